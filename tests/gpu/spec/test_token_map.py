"""A drafter over the most frequent tokens (FR-Spec): its logits are rows of the whole head's, it
drafts no other token, and answers are those of plain decoding.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.models.base import LoadPlan
from aserve.gpu.models.config.model import read_fields
from aserve.gpu.spec import eagle
from aserve.gpu.spec.fused import FusedSpeculation
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter
from aserve.gpu.spec.token_map import read_token_map
from aserve.gpu.step.resolve import DRAFTS
from aserve.messages.base import array_i32
from aserve.tiny import DRAFTERS_DIR
from tests.gpu.drive import Served, serve
from tests.gpu.spec.draft_files import CONFIG, layer_shapes, write_draft
from tests.gpu.spec.test_eagle import ASKED, PLAN, make, plain, spec, target
from tests.gpu.spec.test_every_drafter import DRAFTERS

SIZE = 2048  # of the vocabulary


@cache
def frequent(share: float = 0.8) -> torch.Tensor:
    """The most frequent tokens of the answers, without the rarest ones."""
    tokens = [token for output in plain().values() for token in output]
    ids, counts = np.unique(tokens, return_counts=True)
    chosen = ids[np.argsort(-counts, kind="stable")][: int(len(ids) * share)]
    return torch.from_numpy(chosen.astype(np.int64))


@pytest.fixture
def token_map(tmp_path: Path) -> Path:
    path = tmp_path / "freq.pt"
    torch.save(frequent().tolist(), path)  # FR-Spec saves lists
    return path


def load(token_map: Path | None, **options: Any) -> LoadedDrafter:
    return eagle.load(DraftRequest(spec("EAGLE", token_map=token_map, **options), target(), PLAN))


def num_windows(served: Served) -> int:
    return sum(len(array_i32(batch.sample_rows)) for batch in served.batches) - len(ASKED)


@pytest.mark.parametrize(
    "shape", [{}, DRAFTERS["EAGLE with a dynamic tree"], {"token_tree": "static"}]
)
def test_answers_stay_and_drafts_are_tokens_of_the_map(
    token_map: Path, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer has tokens outside the map, which only the model can give."""
    drafted: list[torch.Tensor] = []
    executor = make(spec("EAGLE", token_map=token_map, **shape), dtype="float64", depth=2, lead=2)
    mode: Any = executor._runner._parts.mode
    drafter = mode._windows._drafter._drafter
    draft = type(drafter).draft

    def noted(self: Any, *given: Any) -> Any:
        drafts = draft(self, *given)
        drafted.append(drafts.tokens.unique())
        return drafts

    monkeypatch.setattr(type(drafter), "draft", noted)
    served = serve(executor, ASKED, chaos=2)
    assert served.outputs == plain()
    assert not served.num_resyncs
    outside = [{*output} - {*frequent().tolist()} for output in plain().values()]
    assert all(outside)
    assert {*torch.cat(drafted).tolist()} <= {*frequent().tolist()}
    assert num_windows(served) < sum(map(len, served.outputs.values())) * 0.8


def test_compiled_steps_draft_what_single_operators_draft(
    token_map: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Mock(side_effect=FusedSpeculation.step)
    monkeypatch.setattr(FusedSpeculation, "step", lambda *given: step(*given))
    served = []
    for debug_checks in (False, True):
        settings: dict[str, Any] = {"dtype": "float32", "debug_checks": debug_checks}
        executor = make(spec("EAGLE", token_map=token_map), depth=2, lead=2, **settings)
        served.append((serve(executor, ASKED), executor._runner.relay.table(DRAFTS)[1:].clone()))
    (fused, drafts), (single, expected) = served
    assert step.call_count == len(fused.batches)
    assert fused.outputs == single.outputs == plain()
    assert torch.equal(drafts[:, 0], expected[:, 0])
    assert len(fused.batches) == len(single.batches)


@pytest.mark.parametrize("has_head", [False, True])
def test_logits_are_those_of_the_whole_head(
    tmp_path: Path, token_map: Path, *, has_head: bool
) -> None:
    directory = DRAFTERS_DIR / "eagle"
    if has_head:
        shapes = {
            **layer_shapes("layers.0", width=128),
            "layers.0.post_attention_layernorm.weight": (128,),
            "fc.weight": (128, 256),
            "lm_head.weight": (SIZE, 128),
        }
        directory = write_draft(tmp_path / "draft", shapes, {**CONFIG})
    reduced, whole = (load(path, draft_model_dir=directory).model for path in (token_map, None))
    assert reduced is not None
    assert whole is not None
    hidden = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).double()
    ids = frequent().sort().values
    torch.testing.assert_close(reduced.logits(hidden), whole.logits(hidden)[:, ids])
    assert target().logits(hidden).shape == (3, SIZE)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (torch.tensor([5, SIZE]), f"ids outside the model's {SIZE} tokens"),
        (torch.tensor([-1, 5]), f"ids outside the model's {SIZE} tokens"),
        (torch.tensor([5, 6, 5]), "1 of its ids are there more than once"),
        (torch.tensor([[5, 6]]), r"the shape \(1, 2\), not token ids"),
        (torch.tensor([0.5]), r"torch.float32 values"),
        ([], r"the shape \(0,\)"),
        ({"ids": [5]}, "it is not a tensor or a list of token ids"),
    ],
)
def test_a_file_that_is_no_map_is_refused(tmp_path: Path, stored: object, message: str) -> None:
    path = tmp_path / "map.pt"
    torch.save(stored, path)
    with pytest.raises(ConfigError, match=message):
        read_token_map(path, vocab_size=SIZE)
    path.write_bytes(b"12, 13")
    with pytest.raises(ConfigError, match="it is not a tensor or a list"):
        read_token_map(path, vocab_size=SIZE)


@pytest.mark.parametrize("algorithm", sorted({*ALGORITHMS} - {"EAGLE"}))
def test_other_drafters_refuse_a_map(token_map: Path, algorithm: str) -> None:
    asked = DraftRequest(spec(algorithm, token_map=token_map), target(), PLAN)
    with pytest.raises(ConfigError, match="is for drafters of EAGLE-1 alone"):
        ALGORITHMS[algorithm](asked)


def test_an_assistant_that_is_asked_for_as_eagle_refuses_a_map(token_map: Path) -> None:
    assistant = DRAFTERS_DIR / "frozen_kv"
    assert read_fields(assistant).text("model_type")
    with pytest.raises(ConfigError, match="is for drafters of EAGLE-1 alone"):
        load(token_map, draft_model_dir=assistant)


def test_dummy_weights_are_reduced_as_well(token_map: Path) -> None:
    plan = LoadPlan(torch.float32, is_dummy=True)
    options = spec("EAGLE", token_map=token_map)
    loaded = eagle.load(DraftRequest(options, target(torch.float32), plan))
    assert loaded.model is not None
    assert loaded.model.logits(torch.ones(1, 128)).shape == (1, len(frequent()))
