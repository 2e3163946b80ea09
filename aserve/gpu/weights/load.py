"""From a model directory to a model on a device.

It knows no family and no request. What does not fit is refused before a value is read: the
configuration, the names and shapes of the weights, the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from aserve.gpu.fallback.blueprint import read_transformers_blueprint
from aserve.gpu.models.causal_model import CausalModel
from aserve.gpu.models.config import ModelConfig, architecture_of, parse_config, read_fields
from aserve.gpu.models.registry import FAMILIES, Code, Family, choose_code
from aserve.gpu.weights.blueprint import Blueprint, LoadPlan
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.inventory import Inventory, check_fit
from aserve.gpu.weights.progress import LoadProgress
from aserve.gpu.weights.reader import WeightReader


@dataclass(frozen=True, slots=True)
class NativeBlueprint:
    model_dir: Path
    family: Family
    config: ModelConfig

    @property
    def stored_dtype(self) -> str | None:
        return self.config.dtype

    @property
    def num_weights(self) -> int:
        return self._inventory(torch.float32).num_weights

    def load(self, plan: LoadPlan) -> CausalModel:
        build, config, target = self.family.build, self.config, plan.target
        context_len = config.context_len(plan.max_model_len)
        inventory = self._inventory(plan.dtype)
        size_bytes, dtype = inventory.size_bytes, plan.dtype
        progress = LoadProgress(size_bytes, dtype=dtype, on_progress=plan.on_progress)
        if plan.is_dummy:
            target.check_room(size_bytes, dtype)
            dummy = DummyWeights(target, dtype=dtype, progress=progress)
            return build(config, dummy, max_model_len=context_len)
        with Checkpoint(self.model_dir, target.device) as checkpoint:
            check_fit(inventory, checkpoint)
            target.check_room(size_bytes, dtype)
            reader = WeightReader(checkpoint, target, dtype=dtype, progress=progress)
            return build(config, reader, max_model_len=context_len)

    def _inventory(self, dtype: torch.dtype) -> Inventory:
        """What the model asks for; nothing is read."""
        inventory = Inventory(dtype)
        # No position is ever looked up in this one.
        self.family.build(self.config, inventory, max_model_len=1)
        return inventory


def read_blueprint(model_dir: Path, model_impl: str = "auto") -> tuple[Blueprint, Code]:
    fields = read_fields(model_dir)
    architecture = architecture_of(fields)
    code = choose_code(architecture, model_impl)
    if code.name == "transformers":
        return read_transformers_blueprint(model_dir, architecture), code
    family = FAMILIES[architecture]
    config = parse_config(fields, defaults=family.defaults)
    return NativeBlueprint(model_dir, family, config), code
