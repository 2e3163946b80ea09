"""In which form a device holds a model's weights: what was asked for, and what was chosen.

It knows no device: each chooses for itself (`Device.weight_format`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aserve.errors import ConfigError
from aserve.gpu.layers.linear import Prepare

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """`dtype` as the user gave it; `stored` is what the checkpoint says of itself."""

    dtype: str
    stored: str | None
    num_weights: int
    quantization: str | None = None  # of linear layers, while they are loaded
    is_deterministic: bool = False  # a token's products must not depend on other tokens

    @property
    def given(self) -> torch.dtype | None:
        """The dtype that was asked for by name, which is honoured exactly; None: `auto`."""
        return None if self.dtype == "auto" else parse_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """`dtype` is that of activations, norms and KV; `prepare` makes the linear layers; `about` says
    both, and why, in a few words. `stored_bits` of a weight, where they are not those of `dtype`;
    `max_threads` that gain anything, where that is known;
    `max_mixed_prefill_tokens` of a step that decodes too, where fewer than fit are better.
    """

    dtype: torch.dtype
    prepare: Prepare
    about: str
    stored_bits: int | None = None
    max_threads: int | None = None
    max_mixed_prefill_tokens: int | None = None

    @property
    def weight_bits(self) -> int:
        return self.stored_bits or 8 * self.dtype.itemsize


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
