"""Drafters as they are published: every tensor of their real names, shapes and dtypes is taken or
left out on purpose, in both dialects of configs, and the model that is built has these shapes.

Weights are meta tensors, so that gigabytes take no room; values are compared elsewhere, in small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.models.base import CausalModel, LoadPlan
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import parse_config
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.spec.dflash import BlockModel
from aserve.gpu.spec.registry import ALGORITHMS
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter, SpecOptions
from aserve.gpu.weights.inventory import Inventory
from aserve.gpu.weights.source import Target
from tests.gpu.spec.published import PUBLISHED, Published, as_transformers_5, write_holes

META = torch.device("meta")
NUM_TOKENS = 3


@pytest.fixture(autouse=True)
def weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read, however much there is."""

    def reader(*_: object, dtype: torch.dtype, **__: object) -> Inventory:
        return Inventory(dtype)

    monkeypatch.setattr("aserve.gpu.spec.checkpoint.WeightReader", reader)
    monkeypatch.setattr(Target, "check_room", lambda *_: None)


def target_of(published: Published, *, is_new: bool) -> CausalModel:
    config = dict(published.target)
    fields = Fields(as_transformers_5(config) if is_new else config, source="config.json")
    family: Any = FAMILIES[config["architectures"][0]]
    parsed = parse_config(fields, defaults=family.defaults)
    model: CausalModel = family.build(parsed, Inventory(torch.bfloat16), max_model_len=16)
    return model


def load(published: Published, directory: Path, *, is_new: bool) -> LoadedDrafter:
    own = None if published.is_in_target else directory
    options = SpecOptions(published.algorithm, draft_model_dir=own)
    plan = LoadPlan(torch.bfloat16)
    target = target_of(published, is_new=is_new)
    return ALGORITHMS[published.algorithm](
        DraftRequest(options, target, plan, target_dir=directory)
    )


def attend(layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor:
    width = getattr(layer, "value_dim", 0) or layer.head_dim
    return torch.empty(NUM_TOKENS, layer.num_heads, width, dtype=torch.bfloat16, device=META)


def logits_of(loaded: LoadedDrafter, target_size: int) -> Tensor:
    """Those of a forward with hidden states of the target."""
    model: Any = loaded.model
    ids = torch.zeros(NUM_TOKENS, dtype=torch.int64, device=META)
    features = tuple(
        torch.empty(NUM_TOKENS, target_size, dtype=torch.bfloat16, device=META)
        for _ in loaded.drafter.inputs.layer_ids or (0,)
    )
    if isinstance(model, BlockModel):
        model.write_context(model.context(features), ids, attend)
        hidden = model.forward(ids, ids, attend)
    else:
        fuse = getattr(model, "fuse", torch.cat)
        hidden = model.forward(ids, ids, attend, hidden=fuse(features))
    logits: Tensor = model.logits(hidden)
    return logits


@pytest.mark.parametrize("is_new", [False, True], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_drafter_loads_and_has_its_shapes(
    name: str, tmp_path: Path, *, is_new: bool
) -> None:
    published = PUBLISHED[name]
    config = as_transformers_5(published.config) if is_new else published.config
    directory = write_holes(tmp_path / "draft", config, published.tensors)
    loaded = load(published, directory, is_new=is_new)
    assert loaded.drafter.max_drafts == published.num_drafts
    logits = logits_of(loaded, published.target["hidden_size"])
    assert logits.shape == (NUM_TOKENS, published.draft_vocab_size)
    [(first, (dtype, shape)), *_] = published.tensors.items()
    for wrong in (
        {**published.tensors, first: (dtype, (*shape[:-1], shape[-1] + 128))},
        {other: each for other, each in published.tensors.items() if other != first},
    ):
        write_holes(directory, config, wrong)
        with pytest.raises(ConfigError, match=r"don't fit its config: (of another shape|missing)"):
            load(published, directory, is_new=is_new)
