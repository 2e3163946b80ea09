"""Grouped linear layers: each expert of a mixture multiplies the rows that were sent to it.

    y[r] = x[r] W[e]^T + b[e]    for the rows starts[e] <= r < ends[e]

Like a linear layer, a grouped one is built by the device (`PrepareGrouped`). The default is plain
torch: one linear layer per expert, in the device's own format, over all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from aserve.gpu.layers.linear import Linear, LinearOp, Prepare


class Groups(NamedTuple):
    """The rows of each expert. Groups don't overlap; rows outside of them belong to no expert."""

    starts: Tensor  # int32 [experts]
    ends: Tensor  # int32 [experts]


class GroupedLinearOp(Protocol):
    """A grouped linear layer that is ready to run."""

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        """x [rows, in] -> [rows, out]. Rows outside of the groups are undefined."""


class QuantizedExperts(Protocol):
    """The weights [experts, out, in] of experts that their checkpoint has quantized."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Returns the model's dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns experts, outputs and inputs."""

    def linears(self, biases: Iterable[Tensor | None]) -> Iterator[Linear]:
        """Yields a linear layer for each expert."""

    def widened(self) -> Tensor:
        """Returns the weights in the model's dtype."""


ExpertWeights: TypeAlias = Tensor | QuantizedExperts


class PrepareGrouped(Protocol):
    """Called once for every grouped layer."""

    def __call__(
        self, weights: ExpertWeights, biases: Tensor | None, prepare: Prepare, /
    ) -> GroupedLinearOp:
        """weights [experts, out, in], biases [experts, out], on the device and in the model's
        dtype, or quantized. `prepare` makes the device's linear layers."""


class AllRowsPerExpert:
    """Every expert multiplies every row, and each row keeps the product of its own expert. So
    nothing waits for the bounds; devices have something faster."""

    __slots__ = ("_experts",)

    def __init__(self, experts: tuple[LinearOp, ...]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        rows = torch.arange(len(x), device=x.device)[:, None]
        out = self._experts[0](x)
        for expert, start, end in zip(self._experts[1:], *(b[1:] for b in groups), strict=True):
            out = torch.where((rows >= start) & (rows < end), expert(x), out)
        return out


def linear_per_expert(
    weights: ExpertWeights, biases: Tensor | None, prepare: Prepare, /
) -> AllRowsPerExpert:
    """The default `PrepareGrouped`."""
    return AllRowsPerExpert(split_experts(weights, biases, prepare))


def split_experts(
    weights: ExpertWeights, biases: Tensor | None, prepare: Prepare
) -> tuple[LinearOp, ...]:
    """One linear layer for each expert. The arguments are those of `PrepareGrouped`."""
    linears = linears_of(weights, biases)
    return tuple(prepare(each, weights.device, dtype=weights.dtype) for each in linears)


def linears_of(weights: ExpertWeights, biases: Tensor | None) -> Iterator[Linear]:
    """Yields the linear layer of each expert, before a device takes it over."""
    every_bias = (None,) * weights.shape[0] if biases is None else biases
    if isinstance(weights, Tensor):
        return map(Linear, weights, every_bias)
    return weights.linears(every_bias)


def widened(weights: ExpertWeights) -> Tensor:
    return weights if isinstance(weights, Tensor) else weights.widened()
