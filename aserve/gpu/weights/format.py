"""The format in which a device holds a model's weights: the request, and the device's answer.

Each device chooses for itself (`Device.weight_format`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from aserve.errors import ConfigError
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.kv.store import kv_dtype_name
from aserve.gpu.layers.grouped_linear import PrepareGrouped, linear_per_expert
from aserve.gpu.layers.linear import Prepare

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """The user's options and the model's size, from which a device chooses a format."""

    dtype: str  # the user's option: "auto" or a name in DTYPES
    stored: str | None  # the checkpoint's dtype, where its config names one
    num_weights: int
    quantization: str | None = None  # of linear layers, applied while they are loaded
    stored_quantization: str | None = None  # a format that the checkpoint's linear layers have
    is_deterministic: bool = False  # a token's result must not depend on the other tokens

    @property
    def given(self) -> torch.dtype | None:
        """The dtype that the user named; None: `auto`.

        Weights and KV are of it, and products as far as the device has any (`choose_cpu_format`).
        """
        return None if self.dtype == "auto" else parse_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of a model's weights on a device, and the settings that are best with it."""

    dtype: torch.dtype  # of activations and norms
    prepare: Prepare  # makes the linear layers
    about: str  # the choice and its reason in a few words, for the log
    prepare_grouped: PrepareGrouped = linear_per_expert  # makes the layers of experts
    prepare_moved: PrepareGrouped | None = (
        None  # of experts that move between ranks; None: the same
    )
    stored_bits: float | None = None  # per weight of any linear layer; None: those of `dtype`
    # Of the scale and the offset of a group of weights, where layers that the checkpoint has
    # quantized stay so; None: none stays.
    factor_bits: int | None = None
    kv_dtype: torch.dtype | None = None  # that is best for keys and values; None: `dtype`
    max_threads: int | None = None  # more threads than this make a step no faster; None: unknown
    max_mixed_prefill_tokens: int | None = None  # prefill cap of a mixed step; None: no cap

    @property
    def weight_bits(self) -> float:
        return self.stored_bits or 8 * self.dtype.itemsize

    def kv_dtype_for(self, name: str, layers: Iterable[LayerSpec]) -> str:
        """Returns what --kv-cache-dtype names, with `auto` resolved where another dtype than the
        model's is best. NOTE: latents keep the model's, since no kernel of the CPU reads others."""
        has_latents = any(layer.value_dim is not None for layer in layers)
        if name != "auto" or self.kv_dtype is None or has_latents:
            return name
        return kv_dtype_name(self.kv_dtype)


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
