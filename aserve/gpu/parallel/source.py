"""The weight source of one rank: it adds the collectives to the products that need them.

    column parallel   y_r = x W_r^T           rank r has rows of W: its heads, or inner elements
    row parallel      y = sum_r x_r W_r^T     rank r has columns of W; its bias is added to the sum
    vocabulary        y = concat_r x W_r^T    the head: rank r has the logits of a part of all ids

Source: https://arxiv.org/abs/1909.08053. A layer asks for the shapes of its own rank and knows of
no other one. Embeddings, norms and routers are on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp, Groups
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.models.sharding import HEAD, ON_EVERY_RANK, ROW_PARALLEL, can_divide
from aserve.gpu.parallel.collectives import ALONE, Collectives
from aserve.gpu.weights.source import ExpertPart, Shard, Target, WeightSource


class SummedLinear:
    """A row-parallel product: the sum of what the ranks have, and then the bias."""

    __slots__ = ("bias", "is_summed_later", "part", "ranks")

    def __init__(self, part: LinearOp, bias: Tensor | None, ranks: Collectives) -> None:
        self.part = part
        self.bias = bias  # [out], on every rank
        self.ranks = ranks
        self.is_summed_later = False  # the norm behind it sums (fused_norm.py)

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [tokens, in of this rank] -> [tokens, out]."""
        if self.is_summed_later:
            return self.part(x)
        total = self.ranks.sum(self.part(x))
        return total if self.bias is None else total + self.bias


class SummedGroupedLinear:
    """A row-parallel product of experts. It sums rows, which are more than there are tokens."""

    __slots__ = ("_ranks", "part")

    def __init__(self, part: GroupedLinearOp, ranks: Collectives) -> None:
        self.part = part
        self._ranks = ranks

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        """x [rows, in of this rank] -> [rows, out]."""
        return self._ranks.sum(self.part(x, groups))


class PlacedExperts:
    """A grouped linear layer of the experts that this rank has. Only weights that are moved are
    kept beside it, as numbers."""

    __slots__ = ("_prepare", "_stack", "device", "part")

    def __init__(
        self,
        weights: ExpertWeights,
        prepare: Callable[[ExpertWeights], GroupedLinearOp],
        *,
        are_moved: bool = True,
    ) -> None:
        self._prepare = prepare
        self._stack = weights if are_moved and isinstance(weights, Tensor) else None
        self.device = weights.device
        self.part = prepare(weights)

    @property
    def stack(self) -> Tensor:
        """Returns the weights [experts, out, in] of experts that are moved."""
        assert self._stack is not None
        return self._stack

    def replace(self, stack: Tensor) -> None:
        """stack [experts, out, in]. Captured graphs read the weights where they are."""
        self.stack.copy_(stack)
        self.part = self._prepare(self.stack)

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        """x [rows, in] -> [rows, out], with the groups of this rank's experts."""
        return self.part(x, groups)


class ConcatLinear:
    """The head of a vocabulary that is divided."""

    __slots__ = ("_ranks", "part")

    def __init__(self, part: LinearOp, ranks: Collectives) -> None:
        self.part = part
        self._ranks = ranks

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [tokens, hidden] -> [tokens, vocab]."""
        return self._ranks.concat(self.part(x))


class RankWeights:
    """A `WeightSource` of one rank around one that reads the rank's parts."""

    __slots__ = ("_ranks", "_shard", "_source", "_stacks", "device", "dtype", "elementwise")

    def __init__(self, source: WeightSource, ranks: Collectives, shard: Shard) -> None:
        self._source = source
        self._ranks = ranks
        self._shard = shard
        self._stacks: list[ExpertWeights] = []  # of experts that are placed, or row parallel
        self.device = source.device
        self.dtype = source.dtype
        self.elementwise = source.elementwise
        if not shard.has_own_rows:
            self.elementwise = replace(source.elementwise, mean=_mean_over(ranks))

    def tensor(
        self, name: str, shape: tuple[int, ...], *, offset: float = 0.0, is_wide: bool = False
    ) -> Tensor:
        if _module(name.removesuffix(".weight")) in ROW_PARALLEL:
            raise ConfigError(f"{name} is row parallel, and its layer does not sum over ranks")
        return self._source.tensor(name, shape, offset=offset, is_wide=is_wide)

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        return self._source.number(names, default=default)

    def linear(
        self,
        parts: Mapping[str, int],
        *,
        in_features: int,
        bias: bool,
        row_order: Tensor | None = None,
    ) -> LinearOp:
        modules = {_module(name) for name in parts}
        is_whole = any(self._shard.is_whole_expert(name) or self._is_own(name) for name in parts)
        if modules & ROW_PARALLEL and not is_whole:
            assert row_order is None
            return self._summed(parts, in_features, has_bias=bias)
        if modules == {HEAD} and not is_whole and all(map(self._divides, parts.values())):
            own = {name: n // self._ranks.num_ranks for name, n in parts.items()}
            part = self._source.linear(own, in_features=in_features, bias=bias)
            return ConcatLinear(part, self._ranks)
        return self._source.linear(parts, in_features=in_features, bias=bias, row_order=row_order)

    def stacked(
        self, name: str, parts: Mapping[str, int], *, count: int, in_features: int
    ) -> ExpertWeights:
        stack = self._source.stacked(name, parts, count=count, in_features=in_features)
        if self._shard.experts is not None or ROW_PARALLEL.intersection(parts):
            self._stacks.append(stack)
        return stack

    def grouped(self, weights: ExpertWeights, biases: Tensor | None = None) -> GroupedLinearOp:
        is_divided = any(weights is stack for stack in self._stacks)
        self._stacks = [stack for stack in self._stacks if stack is not weights]
        if not is_divided:
            return self._source.grouped(weights, biases)
        if biases is not None:
            raise ConfigError("biases of experts are not divided among ranks")
        if self._shard.experts is not None:
            are_moved = self._shard.moves_experts
            return PlacedExperts(weights, self._source.grouped, are_moved=are_moved)
        return SummedGroupedLinear(self._source.grouped(weights), self._ranks)

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        if _module(name) != HEAD or self._is_own(name) or not self._divides(len(weight)):
            return self._source.tied_linear(name, weight)
        own = weight.chunk(self._ranks.num_ranks)[self._ranks.rank]
        return ConcatLinear(self._source.tied_linear(name, own), self._ranks)

    def _summed(
        self, parts: Mapping[str, int], in_features: int, *, has_bias: bool
    ) -> SummedLinear:
        [(name, num_rows)] = parts.items()
        part = self._source.linear(parts, in_features=in_features, bias=False)
        bias = self._source.tensor(f"{name}.bias", (num_rows,)) if has_bias else None
        return SummedLinear(part, bias, self._ranks)

    def _is_own(self, name: str) -> bool:
        return self._shard.has_own_rows and self._shard.is_whole(name)

    def _divides(self, size: int) -> bool:
        return can_divide(size, self._ranks.num_ranks)


def for_rank(
    target: Target,
    ranks: Collectives,
    *,
    beside: Mapping[str, object],
    experts: ExpertPart | None = None,
    has_own_rows: bool = False,
) -> Target:
    """Returns the target that a rank's part of a model is built for: the part of `ranks` of every
    layer, or, with `experts`, of all but the experts, of which it has that part. With
    `has_own_rows`, attention is whole. `beside` has the values of options that are not divided
    among ranks; ConfigError is raised if one is set."""
    if ranks is ALONE and experts is None:
        return target
    asked = [flag for flag, value in beside.items() if value]
    if asked:
        raise ConfigError(
            f"{' and '.join(asked)} cannot be divided among ranks; leave out "
            "--tensor-parallel-size, --expert-parallel-size and --enable-dp-attention",
            param="tensor_parallel_size",
        )
    shard = Shard(ranks.rank, ranks.num_ranks, experts=experts, has_own_rows=has_own_rows)
    if shard.moves_experts:
        target = replace(target, prepare_grouped=target.prepare_moved or target.prepare_grouped)
    return replace(target, shard=shard, divide=lambda source: RankWeights(source, ranks, shard))


def _mean_over(ranks: Collectives) -> Callable[[Tensor], Tensor]:
    def mean(x: Tensor) -> Tensor:
        return ranks.sum(x) / ranks.num_ranks

    return mean


def _module(name: str) -> str:
    """The last component, by which the tables are kept; none of them has the empty one."""
    return "" if any(part in name for part in ON_EVERY_RANK) else name.rpartition(".")[2]
