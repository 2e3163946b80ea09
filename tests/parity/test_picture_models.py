"""Models that read pictures against transformers: random weights, two pictures of different shapes,
one prompt, whole and in chunks that cut a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.gpu.models.vision_language import TokenFeatures, VisionLanguageModel
from aserve.picture import rope_offsets
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend, logits_of
from tests.parity.picture_models import (
    IMAGE,
    KINDS,
    MAX_MODEL_LEN,
    PicturePrompt,
    random_picture,
    save_picture_model,
)

# One picture is wide, the other one is high; the windows of Qwen2.5-VL are cut at two edges.
PARTS = (5, random_picture(2, 5), 4, random_picture(3, 1), 9)


@torch.inference_mode()
def picture_logits(model: VisionLanguageModel, prompt: PicturePrompt, chunks: list[int]) -> Tensor:
    places = positions = torch.arange(len(prompt.ids))
    if model.has_axes:
        offsets = torch.from_numpy(rope_offsets(prompt.pictures)).long()
        positions = places + offsets[:, places.clamp(max=offsets.shape[1] - 1)]
    at = (prompt.ids == IMAGE).nonzero().squeeze(1)
    values = torch.cat([model.encode(p) for p in prompt.pictures], dim=1)
    attend, logits = DenseAttend(), []
    attend.spans = [(p.start, p.end) for p in prompt.pictures if p.sees_itself]
    for part in places.split(chunks):
        inside = (at >= part[0]) & (at <= part[-1])
        features = TokenFeatures(at[inside] - part[0], values[:, inside])
        own = positions[..., part]
        hidden = model.forward_with_pictures(prompt.ids[part], own, attend, features)
        logits.append(model.logits(hidden))
    return torch.cat(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = save_picture_model(kind, tmp_path)
    prompt = PicturePrompt.of(*PARTS, kind=kind)
    with torch.inference_mode():
        expected = reference(**prompt.inputs()).logits[0]
        text = reference(input_ids=prompt.ids[None, :5]).logits[0]
    model = load_model(tmp_path, max_model_len=MAX_MODEL_LEN)
    assert isinstance(model, VisionLanguageModel)
    # The tokens of one that see each other come together.
    first = [3, 13] if prompt.pictures[0].sees_itself else [8, 1, 7, 4]
    for chunks in ([len(prompt.ids)], [*first, len(prompt.ids) - sum(first)]):
        logits = picture_logits(model, prompt, chunks)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)
    torch.testing.assert_close(logits_of(model, prompt.ids[:5]), text, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    "parts",
    [
        (3, (2, 5), 4, (3, 1), 9),
        ((4, 4), 1, (1, 6), 1),
        (1, (1, 1), 2),
        (2, (6, 2)),
        (7,),
    ],
)
def test_positions_are_those_of_transformers(parts: tuple[int | tuple[int, int], ...]) -> None:
    """At every place of the prompt, and after it."""
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    prompt = PicturePrompt.of(
        *(part if isinstance(part, int) else random_picture(*part) for part in parts)
    )
    model: Any = Qwen2VLModel.__new__(Qwen2VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2VLConfig()
    padded = torch.cat((prompt.ids, torch.full((5,), 9)))[None]
    grids = torch.tensor([[1, 2 * p.rows, 2 * p.columns] for p in prompt.pictures])
    expected, _ = model.get_rope_index(padded, (padded == 150).int(), image_grid_thw=grids)
    offsets = rope_offsets(prompt.pictures)
    places = torch.arange(padded.shape[1])
    last = offsets.shape[1] - 1
    found = places + torch.from_numpy(offsets).long()[:, places.clamp(max=last)]
    assert torch.equal(found, expected[:, 0])
