"""Where a model gets its weights from while it is built.

A model is built twice: from an `Inventory`, which only notes what is asked for, and, when that fits
the checkpoint and the memory, from a `WeightReader`. So a layer has its final weights from the
start, and nothing is ever initialised at random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.kv.store import Scales
from aserve.gpu.layers.linear import LinearOp, Prepare, prepare
from aserve.gpu.layers.ops import PLAIN, Elementwise
from aserve.host.limits import available_memory_bytes


class WeightSource(Protocol):
    """Names are the checkpoint's."""

    device: torch.device
    dtype: torch.dtype
    elementwise: Elementwise  # makes the layers that are no products

    def tensor(self, name: str, shape: tuple[int, ...], *, offset: float = 0.0) -> Tensor:
        """A plain weight, on the device and in the model's dtype.

        `offset` is added to what is stored; the sum is never rounded to a half type.
        """

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        """That of the first name which the checkpoint has; it need not have any."""

    def linear(self, parts: Mapping[str, int], *, in_features: int, bias: bool) -> LinearOp:
        """One product over the rows of several layers: `parts` are their names (without ".weight")
        and row counts.
        """

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        """A layer that has another's weight; the checkpoint may hold a copy of it under `name`,
        too.
        """


def kv_scales(weights: WeightSource, layer: int) -> Scales:
    """1 where the checkpoint says nothing."""
    prefix = f"model.layers.{layer}.self_attn"
    of_keys, of_values = (
        weights.number(
            (f"{prefix}.{x}_scale", f"{prefix}.attn.{x}_scale", f"{prefix}.{x}_proj.{x}_scale"),
            default=1.0,
        )
        for x in ("k", "v")
    )
    return of_keys, of_values


OnProgress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all


def ignore_progress(_done_bytes: int, _total_bytes: int) -> None:
    pass


class LoadProgress:
    """Weights are counted as bytes of `dtype`, the model's, as the total is."""

    __slots__ = ("_dtype", "_num_done", "_on_progress", "_total_bytes")

    def __init__(
        self, total_bytes: int, *, dtype: torch.dtype, on_progress: OnProgress = ignore_progress
    ) -> None:
        self._total_bytes = total_bytes
        self._dtype = dtype
        self._on_progress = on_progress
        self._num_done = 0

    def advance(self, num_weights: int) -> None:
        self._num_done += num_weights
        self._on_progress(self._num_done * self._dtype.itemsize, self._total_bytes)


CPU = torch.device("cpu")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """`memory_bytes`: what the device has free; None asks the host."""

    device: torch.device = CPU
    memory_bytes: int | None = None
    prepare: Prepare = prepare
    elementwise: Elementwise = PLAIN

    def check_room(self, size_bytes: int, dtype: torch.dtype) -> None:
        """Before a value is read."""
        free_bytes = available_memory_bytes() if self.memory_bytes is None else self.memory_bytes
        if size_bytes > free_bytes:
            raise ConfigError(
                f"the model's weights need {size_bytes / GIB:.3f} GiB as "
                f"{str(dtype).removeprefix('torch.')}, but only {free_bytes / GIB:.3f} GiB are "
                "available; take a smaller dtype or a smaller model"
            )


HOST = Target()
