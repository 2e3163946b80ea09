"""Loads a model directory to a device.

Errors in the configuration, in the names and shapes of the weights, and in the memory that they
need are reported before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from aserve.gpu.models.base import CausalModel, LoadPlan, ModelLoader
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import ModelConfig, architecture_of, parse_config, read_fields
from aserve.gpu.models.registry import FAMILIES, Code, Family, choose_code
from aserve.gpu.models.transformers.loader import make_transformers_loader
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.inventory import Inventory, check_fit
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.source import GIB, WHOLE, LoadProgress, Shard

PREDICTORS = ("model.mtp_layers.", "mtp.")
OBJECT_BYTES = 4096  # lower bound of Python's objects for one layer


@dataclass(frozen=True, slots=True)
class NativeLoader:
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
        inventory = self._inventory(plan.dtype, target.shard)
        size_bytes, dtype = inventory.size_bytes, plan.dtype
        progress = LoadProgress(size_bytes, dtype=dtype, on_progress=plan.on_progress)
        if plan.is_dummy:
            target.check_room(size_bytes, dtype)
            dummy = DummyWeights(target, dtype=dtype, progress=progress)
            return build(config, target.wrap(dummy), max_model_len=context_len)
        with Checkpoint(
            self.model_dir, target.device, rename=self._own_name, updates=plan.tensors
        ) as checkpoint:
            check_fit(inventory, checkpoint)
            target.check_room(size_bytes, dtype)
            reader = WeightReader(checkpoint, target, dtype=dtype, progress=progress)
            return build(config, target.wrap(reader), max_model_len=context_len)

    def _own_name(self, name: str) -> str | None:
        """Leaves out the modules of multi-token prediction, which are a drafter's."""
        num_modules = self.config.fields.integer("num_nextn_predict_layers", default=0, minimum=0)
        num_layers = self.config.num_layers
        extra = (f"model.layers.{num_layers + number}." for number in range(num_modules))
        return None if name.startswith((*PREDICTORS, *extra)) else name

    def _inventory(self, dtype: torch.dtype, shard: Shard = WHOLE) -> Inventory:
        """Returns the names and shapes of the model's weights."""
        inventory = Inventory(dtype, shard)
        # This model never runs, so its rotary tables may be short.
        self.family.build(self.config, inventory, max_model_len=1)
        return inventory


def make_loader(
    model_dir: Path, model_impl: str = "auto", *, free_bytes: int | None = None
) -> tuple[ModelLoader, Code]:
    """Reads the configuration and chooses the code that runs the model. `free_bytes`: the memory
    that the model may take, if it is known."""
    fields = read_fields(model_dir)
    if free_bytes is not None:
        check_layer_count(fields, free_bytes)
    architecture = architecture_of(fields)
    code = choose_code(architecture, model_impl)
    if code.name == "transformers":
        return make_transformers_loader(model_dir, architecture), code
    family = FAMILIES[architecture]
    config = parse_config(fields, defaults=family.defaults)
    return NativeLoader(model_dir, family, config), code


def check_layer_count(file: Fields, free_bytes: int) -> None:
    """Refuses a number of layers that cannot fit into memory.

    The bound is a lower one: a layer has at least a square matrix of `hidden_size`, with one byte
    per element, and its Python objects. WHY: the exact check lists all weights, which for ten
    million layers takes minutes and gigabytes.
    """
    fields = file.merged_with("text_config")
    if not (fields.has("num_hidden_layers") and fields.has("hidden_size")):
        return
    layer_bytes = fields.integer("hidden_size") ** 2 + OBJECT_BYTES
    size_bytes = fields.integer("num_hidden_layers") * layer_bytes
    if size_bytes > free_bytes:
        fields.refuse(
            "num_hidden_layers",
            expected="a number of layers that fits into memory: these take at least "
            f"{size_bytes / GIB:,.1f} GiB, and {free_bytes / GIB:,.1f} GiB are available",
        )
