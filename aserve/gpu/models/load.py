"""Loads a model directory to a device.

Errors in the configuration, in the names and shapes of the weights, and in the memory that they
need are reported before any weight is read.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from aserve.errors import ConfigError
from aserve.gpu.kv.layer_groups import Mask
from aserve.gpu.models.base import CausalModel, LoadPlan, ModelLoader
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import (
    OTHER_NAMES,
    ModelConfig,
    architecture_of,
    parse_config,
    read_fields,
)
from aserve.gpu.models.config.quantization import quantization_of
from aserve.gpu.models.pooled_families import EncoderFamily, PooledDecoderFamily
from aserve.gpu.models.registry import (
    FAMILIES,
    Code,
    DecoderFamily,
    Family,
    choose_code,
    pooled_family,
)
from aserve.gpu.models.sharding import check_sharding, rank_config, shard_of
from aserve.gpu.models.stages import EMBEDDINGS, for_stage
from aserve.gpu.models.transformers.loader import make_transformers_loader
from aserve.gpu.models.vision_language import VisionLanguageFamily
from aserve.gpu.weights.checkpoint import Checkpoint, Rename, as_stored
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.inventory import Inventory, check_fit
from aserve.gpu.weights.quantized import stored_name
from aserve.gpu.weights.read_ahead import ReadAhead
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.renamed import older_name
from aserve.gpu.weights.source import HOST, LinearBits, LoadProgress, Target
from aserve.messages.base import GIB

PREDICTORS = ("model.mtp_layers.", "model.mtp.", "mtp.")
OBJECT_BYTES = 4096  # lower bound of Python's objects for one layer


@dataclass(frozen=True, slots=True)
class NativeLoader:
    model_dir: Path
    family: Family
    config: ModelConfig
    names: Rename = as_stored  # of the family
    default_len: int | None = None  # the context, if it is not the one of the configuration

    @property
    def stored_dtype(self) -> str | None:
        return self.config.dtype

    @property
    def stored_quantization(self) -> str | None:
        return stored_name(quantization_of(self.config.fields))

    @property
    def num_weights(self) -> int:
        return self._inventory(torch.float32, self.config).num_weights

    def step_bytes(self, dtype: torch.dtype, bits: LinearBits, *, is_dummy: bool) -> int:
        """Returns the size of the weights that a decode step reads on a device: of all but the
        table of input embeddings, unless the head reads it, too.
        """
        inventory = self._inventory(dtype, self.config)
        if is_dummy:
            held_bytes = inventory.held_bytes(bits)
        else:
            stored = quantization_of(self.config.fields)
            with Checkpoint(self.model_dir, rename=self.own_name, quantization=stored) as found:
                held_bytes = inventory.held_bytes(bits, found.stored_bits)
        reads_table = inventory.copies and bits.every is None
        table = () if reads_table else inventory.shapes.get(EMBEDDINGS, ())
        return held_bytes - (math.prod(table) * dtype.itemsize if table else 0)

    def load(self, plan: LoadPlan) -> CausalModel:
        self._check_ranks(plan.target)
        build, shard = self.family.build, plan.target.shard
        if shard.num_ranks > 1:
            stage = for_stage(dataclasses.replace(HOST, stage=plan.target.stage), self.config)
            whole = self._inventory(plan.dtype, self.config, stage)
            shard = shard_of(self.config, shard, whole.shapes)
        target = for_stage(dataclasses.replace(plan.target, shard=shard), self.config)
        config = rank_config(self.config, shard)
        context_len = config.context_len(plan.max_model_len or self.default_len)
        inventory = self._inventory(plan.dtype, config, target)
        if shard.num_ranks > 1:
            check_sharding(whole, inventory, num_ranks=shard.num_ranks)
        size_bytes, dtype = inventory.size_bytes, plan.dtype
        progress = LoadProgress(size_bytes, dtype=dtype, on_progress=plan.on_progress)
        if plan.is_dummy:
            held_bytes = inventory.held_bytes(target.bits)
            target.check_room(held_bytes, dtype)
            left_bytes = target.free_bytes - held_bytes
            check_rope_table(config, context_len, dtype, left_bytes)
            target.check_added(inventory.linears, dtype, left_bytes)
            dummy = DummyWeights(target, dtype=dtype, progress=progress)
            return build(config, target.wrapped(dummy), max_model_len=context_len)
        with Checkpoint(
            self.model_dir,
            target.device,
            rename=self.own_name,
            updates=plan.tensors,
            quantization=quantization_of(config.fields),
        ) as checkpoint:
            # Every stage checks the whole, so that all of them refuse it, or none.
            is_staged = target.stage.count > 1
            check_fit(self._inventory(dtype, self.config) if is_staged else inventory, checkpoint)
            held_bytes = inventory.held_bytes(target.bits, checkpoint.stored_bits)
            target.check_room(held_bytes, dtype)
            left_bytes = target.free_bytes - held_bytes
            check_rope_table(config, context_len, dtype, left_bytes)
            target.check_added(inventory.linears, dtype, left_bytes)
            reader = WeightReader(checkpoint, target, dtype=dtype, progress=progress)
            with ReadAhead(checkpoint.paths):
                return build(config, target.wrapped(reader), max_model_len=context_len)

    def own_name(self, name: str, /) -> str | None:
        """Leaves out the modules of multi-token prediction, which are a drafter's, and gives the
        parts of a model the names that they have in older checkpoints, or in other families."""
        num_modules = self.config.fields.integer("num_nextn_predict_layers", default=0, minimum=0)
        num_layers = self.config.num_layers
        extra = (f"model.layers.{num_layers + number}." for number in range(num_modules))
        if name.startswith((*PREDICTORS, *extra)):
            return None
        return self.names(older_name(name))

    def _check_ranks(self, target: Target) -> None:
        """Refuses a model that is not divided among ranks, or not into stages."""
        is_staged, architecture = target.stage.count > 1, self.config.architecture
        if is_staged and not isinstance(self.family, DecoderFamily):
            raise ConfigError(
                f"{architecture} cannot be divided into stages; leave out --pipeline-parallel-size",
                param="pipeline_parallel_size",
            )
        shard = target.shard
        if not is_staged and shard.num_ranks == 1 and shard.experts is None:
            return
        weights = Inventory(torch.float32)
        whole = self.family.build(self.config, weights, max_model_len=1)
        if any(layer.mask is Mask.BLOCK_CAUSAL for layer in whole.layers):
            raise ConfigError(
                f"{architecture} is a diffusion language model, which cannot be divided among "
                "ranks; leave out --tensor-parallel-size, --pipeline-parallel-size, "
                "--expert-parallel-size and --enable-dp-attention",
                param="pipeline_parallel_size" if is_staged else "tensor_parallel_size",
            )

    def _inventory(
        self, dtype: torch.dtype, config: ModelConfig, target: Target = HOST
    ) -> Inventory:
        """Returns the names and shapes of the weights of a model of this configuration."""
        inventory = Inventory(dtype, target.shard)
        # This model never runs, so its rotary tables may be short.
        self.family.build(config, target.divide(target.part(inventory)), max_model_len=1)
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
    family = pooled_family(FAMILIES[architecture], model_dir)
    config = parse_config(fields, defaults=family.defaults)
    match family:
        case EncoderFamily() | PooledDecoderFamily():
            default_len = family.context_len(config)
            return NativeLoader(model_dir, family, config, family.own_name, default_len), code
        case DecoderFamily() | VisionLanguageFamily():
            return NativeLoader(model_dir, family, config, family.own_name), code
        case _:
            return NativeLoader(model_dir, family, config), code


def check_layer_count(file: Fields, free_bytes: int) -> None:
    """Refuses a number of layers that cannot fit into memory.

    The bound is a lower one: a layer has at least a square matrix of `hidden_size`, with one byte
    per element, and its Python objects. WHY: the exact check lists all weights, which for ten
    million layers takes minutes and gigabytes.
    """
    fields = file.merged_with("text_config").over({}, other_names=OTHER_NAMES)
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


def check_rope_table(
    config: ModelConfig, max_model_len: int, dtype: torch.dtype, left_bytes: int
) -> None:
    """Refuses a context whose rope table is larger than the memory beside the weights."""
    size_bytes = max_model_len * config.rotary_dim * dtype.itemsize
    if size_bytes > left_bytes:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the rope table of as many positions needs "
            f"{size_bytes / GIB:,.3f} GiB, and {left_bytes / GIB:,.3f} GiB are available beside "
            "the weights; choose a smaller --max-model-len",
            param="max_model_len",
        )
