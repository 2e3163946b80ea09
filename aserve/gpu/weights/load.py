"""From a model directory to a model on a device.

It knows no family and no request. What does not fit is refused before a value is read: the
configuration, the names and shapes of the weights, the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from aserve.gpu.models.causal_model import CausalModel
from aserve.gpu.models.config import ModelConfig, architecture_of, parse_config, read_fields
from aserve.gpu.models.registry import Family, find_family
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.form import parse_dtype
from aserve.gpu.weights.inventory import Inventory, check_fit
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.target import HOST, OnProgress, Target


def _ignore_progress(_done_bytes: int, _total_bytes: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a model directory says of its model, apart from the weights."""

    family: Family
    config: ModelConfig

    def inventory(self, dtype: torch.dtype) -> Inventory:
        """What the model asks for; nothing is read."""
        inventory = Inventory(dtype)
        # No position is ever looked up in this one.
        self.family.build(self.config, inventory, max_model_len=1)
        return inventory


def read_blueprint(model_dir: Path) -> Blueprint:
    fields = read_fields(model_dir)
    family = find_family(architecture_of(fields))
    return Blueprint(family, parse_config(fields, defaults=family.defaults))


def load_model(
    model_dir: Path,
    *,
    dtype: str = "float32",
    max_model_len: int | None = None,
    load_format: str = "auto",
    target: Target = HOST,
    on_progress: OnProgress = _ignore_progress,
) -> CausalModel:
    """`load_format` "dummy" draws weights at random and needs no checkpoint.

    `on_progress` is called on this thread.
    """
    blueprint = read_blueprint(model_dir)
    family, config = blueprint.family, blueprint.config
    context_len = config.context_len(max_model_len)
    model_dtype = parse_dtype(dtype)
    inventory = blueprint.inventory(model_dtype)
    total_bytes = inventory.size_bytes
    if load_format == "dummy":
        target.check_room(total_bytes, model_dtype)
        dummy = DummyWeights(
            target, dtype=model_dtype, total_bytes=total_bytes, on_progress=on_progress
        )
        return family.build(config, dummy, max_model_len=context_len)
    with Checkpoint(model_dir) as checkpoint:
        check_fit(inventory, checkpoint)
        target.check_room(total_bytes, model_dtype)
        reader = WeightReader(
            checkpoint, target, dtype=model_dtype, total_bytes=total_bytes, on_progress=on_progress
        )
        return family.build(config, reader, max_model_len=context_len)
