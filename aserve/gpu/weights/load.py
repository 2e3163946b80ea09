"""From a model directory to a model on a device.

It knows no family and no request. What does not fit is refused before a value is read: the
configuration, the names and shapes of the weights, the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from aserve.errors import ConfigError
from aserve.gpu.models.causal_model import CausalModel
from aserve.gpu.models.config import ModelConfig, architecture_of, parse_config, read_fields
from aserve.gpu.models.registry import find_family
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.inventory import Inventory, check_fit
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.target import HOST, OnProgress, Target

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _ignore_progress(_done_bytes: int, _total_bytes: int) -> None:
    pass


def load_model(
    model_dir: Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    load_format: str = "auto",
    target: Target = HOST,
    on_progress: OnProgress = _ignore_progress,
) -> CausalModel:
    """`load_format` "dummy" draws weights at random and needs no checkpoint.

    `on_progress` is called on this thread.
    """
    fields = read_fields(model_dir)
    family = find_family(architecture_of(fields))
    config = parse_config(fields, defaults=family.defaults)
    context_len = config.context_len(max_model_len)
    model_dtype = resolve_dtype(dtype, config, device=target.device)
    inventory = Inventory(model_dtype)
    family.build(config, inventory, max_model_len=1)  # no position is ever looked up in this one
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


def resolve_dtype(name: str, config: ModelConfig, *, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's, but float32 on the CPU, where half types are slow without the
    right instructions.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.dtype or "float32"
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]
