"""The interface through which a model gets its weights while it is built, and the target they are
built for.

A model is built twice. The first time its source is an `Inventory`, which only notes the names and
shapes that are asked for. When these fit the checkpoint and the memory, the model is built again
from a `WeightReader` (or from `DummyWeights`). So every layer has its final weights from the start,
and nothing is initialised at random and overwritten.

A model file is written for one device. Which part of each weight a device holds is decided by the
target's `Shard`: the model asks for the shapes that it computes with, and the source knows where
they lie in the checkpoint's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.kv.store import Scales
from aserve.gpu.layers.grouped_linear import (
    ExpertWeights,
    GroupedLinearOp,
    PrepareGrouped,
    linear_per_expert,
)
from aserve.gpu.layers.linear import LinearOp, Prepare, prepare
from aserve.gpu.layers.ops import PLAIN, Elementwise
from aserve.gpu.weights.quantized import StoredBits
from aserve.host.limits import available_memory_bytes
from aserve.messages.base import GIB


class WeightSource(Protocol):
    """Weights by their names in the checkpoint, as layers of `dtype` on `device`."""

    device: torch.device
    dtype: torch.dtype
    elementwise: Elementwise  # makes norms and activations

    def tensor(
        self, name: str, shape: tuple[int, ...], *, offset: float = 0.0, is_wide: bool = False
    ) -> Tensor:
        """The weight `name` plus `offset`. A wide one is at least float32, and so is one with an
        offset, because a 16-bit dtype would round the sum."""

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        """The scalar under the first of `names` that the checkpoint has, or else `default`."""

    def linear(
        self,
        parts: Mapping[str, int],
        *,
        in_features: int,
        bias: bool,
        row_order: Tensor | None = None,
    ) -> LinearOp:
        """Returns one linear layer whose rows are those of several checkpoint layers, joined.
        `parts` maps their names (without ".weight") to their numbers of rows. Row r of the layer,
        and of its bias, is row `row_order[r]` of the joined layers; int64 on the host, None: row r.
        """

    def stacked(
        self, name: str, parts: Mapping[str, int], *, count: int, in_features: int
    ) -> ExpertWeights:
        """Returns the weights of those of `count` experts that this device has, [experts, rows,
        in_features]. The checkpoint has one tensor for each expert and part,
        `{name}.{expert}.{part}.weight`; an expert's rows are those of its `parts`, joined as in
        `linear`.
        """

    def grouped(self, weights: ExpertWeights, biases: Tensor | None = None) -> GroupedLinearOp:
        """Returns a grouped linear layer. weights [experts, out, in] and biases [experts, out] are
        values that this source has given."""

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        """Returns a linear layer with the weight of another layer. The checkpoint may hold a copy
        of the weight under `name` as well.
        """


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def kv_scales(weights: WeightSource, layer: int) -> Scales:
    """Returns the scales of an 8-bit KV cache, for keys and values; 1 where the checkpoint has
    none.
    """
    prefix = f"model.layers.{layer}.self_attn"
    key_scale, value_scale = (
        weights.number(
            (f"{prefix}.{x}_scale", f"{prefix}.attn.{x}_scale", f"{prefix}.{x}_proj.{x}_scale"),
            default=1.0,
        )
        for x in ("k", "v")
    )
    return key_scale, value_scale


OnProgress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all


def ignore_progress(_done_bytes: int, _total_bytes: int) -> None:
    pass


class LoadProgress:
    """Reports loaded bytes, counted in the model's dtype."""

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


OF_OWN_ROWS = re.compile(r"\.(self_attn|linear_attn|conv)\.|^lm_head\b")
EXPERTS = re.compile(r"\.(shared_)?experts?\.")  # in names below a layer's own


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """The experts that one of `num_ranks` devices has. There are as many slots as experts, and
    `num_redundant` more for copies of the first ones; rank r has the r-th part of the slots."""

    rank: int
    num_ranks: int
    num_redundant: int = 0
    are_moved: bool = False  # between ranks, while the model runs

    def num_slots(self, num_experts: int) -> int:
        """Returns the slots of all ranks. Raises ConfigError if they cannot be divided."""
        num_slots = num_experts + self.num_redundant
        if num_slots % self.num_ranks or self.num_redundant > num_experts:
            raise ConfigError(
                f"{num_experts} experts and {self.num_redundant} copies cannot be divided among "
                f"{self.num_ranks} ranks (--expert-parallel-size, --eplb-num-redundant-experts)",
                param="expert_parallel_size",
            )
        return num_slots

    def held(self, num_experts: int) -> tuple[int, ...]:
        """Returns the expert in each slot of this rank."""
        num_own = self.num_slots(num_experts) // self.num_ranks
        first = self.rank * num_own
        return tuple(slot % num_experts for slot in range(first, first + num_own))


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each weight that one of `num_ranks` devices holds.

    `axes` maps the last two components of a tensor's name ("q_proj.weight") to the axis along which
    it is divided into `num_ranks` equal parts. A tensor without an entry is held whole by every
    rank. Where `num_parts` has an entry for a tensor, it is divided into as many parts, of which
    neighbouring ranks share one (KV heads fewer than ranks). A tensor with an entry in `sections`
    consists of sections of these sizes along its first axis, such as queries, keys and values, and
    each of them is divided. With `experts`, a device has some of the experts, and these and the
    shared ones are whole. Tensors whose names begin with one of `whole` are not divided, whatever
    `axes` says, and with `has_own_rows` neither are attention, recurrent layers and the head,
    because the device computes them for rows of its own.
    """

    rank: int = 0
    num_ranks: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    num_parts: Mapping[str, int] = field(default_factory=dict)
    sections: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    experts: ExpertPart | None = None
    has_own_rows: bool = False

    def held_experts(self, num_experts: int) -> tuple[int, ...]:
        """Returns the numbers of the experts whose weights this device has, in their order."""
        if self.experts is None:
            return tuple(range(num_experts))
        return self.experts.held(num_experts)

    @property
    def moves_experts(self) -> bool:
        """Whether experts are moved between ranks, so that their weights are those of the dtype."""
        return self.experts is not None and self.experts.are_moved

    def is_whole_expert(self, name: str) -> bool:
        """Says whether `name` is of an expert, or of a shared one, that is not divided."""
        return self.experts is not None and EXPERTS.search(name) is not None

    def is_whole(self, name: str) -> bool:
        """Says whether `name` is of a part that is not divided, whatever `axes` says."""
        is_own = self.has_own_rows and OF_OWN_ROWS.search(name) is not None
        return is_own or any(part in name for part in self.whole)

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the checkpoint's shape of a tensor of which this rank holds `shape`."""
        axis, count = self._axis(name), self._count(name)
        return tuple(n * count if i == axis else n for i, n in enumerate(shape))

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
        """Returns the indices of this rank's part in the checkpoint's tensor, one per section: what
        they have, joined along the first axis, is the part. `shape` is that of the part.
        """
        whole, axis = tuple(slice(0, size) for size in shape), self._axis(name)
        if axis is None:
            return [whole]
        count = self._count(name)
        number, begin, pieces = self.rank * count // self.num_ranks, 0, []
        for size in self.sections.get(_last_two(name), (shape[axis] * count,)):
            first = begin + number * size // count
            own = slice(first, first + size // count)
            pieces.append((*whole[:axis], own, *whole[axis + 1 :]))
            begin += size
        return pieces

    def _axis(self, name: str) -> int | None:
        if self.is_whole_expert(name) or self.is_whole(name):
            return None
        return self.axes.get(_last_two(name))

    def _count(self, name: str) -> int:
        return self.num_parts.get(_last_two(name), self.num_ranks)


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages of a pipeline, each of which has a part of the layers. If the model
    `has_drafter`, the last stage has the embeddings as well, which drafters read."""

    number: int = 0
    count: int = 1
    has_drafter: bool = False


ONE_STAGE = Stage()


def expert_parts(name: str, parts: Mapping[str, int], expert: int) -> dict[str, int]:
    """Returns the checkpoint's layers of one expert, with their numbers of rows."""
    return {f"{name}.{expert}.{part}": rows for part, rows in parts.items()}


WrapSource: TypeAlias = Callable[[WeightSource], WeightSource]
WrapPart: TypeAlias = Callable[[WeightSource, Shard], WeightSource]


def unwrapped(source: WeightSource, _shard: Shard = WHOLE) -> WeightSource:
    return source


# Raises ConfigError if what `wrap` adds to linear layers of these shapes, by name, does not fit
# into the bytes that are left.
CheckAdded: TypeAlias = Callable[[Mapping[str, tuple[int, int]], torch.dtype, int], None]


def nothing_added(
    _shapes: Mapping[str, tuple[int, int]], _dtype: torch.dtype, _left_bytes: int
) -> None:
    """Raises nothing, because nothing is added."""


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LinearBits:
    """The bits per weight of linear layers and experts on a device; None: those of the dtype."""

    every: float | None = None  # of all layers
    # Of the scale and the offset of a group, where layers stay quantized as they are stored.
    factors: int | None = None

    def of(self, stored: StoredBits | None) -> float | None:
        """`stored`: the bits of the checkpoint's codes, None for numbers."""
        if stored is None or self.factors is None:
            return self.every
        return stored.bits + (0 if stored.group is None else self.factors / stored.group)


@dataclass(frozen=True, slots=True)
class Target:
    """The device that a model is built for, and how its layers are made there."""

    device: torch.device = CPU
    memory_bytes: int | None = None  # free memory of the device; None: of the host
    prepare: Prepare = prepare
    prepare_grouped: PrepareGrouped = linear_per_expert
    prepare_moved: PrepareGrouped | None = None  # of experts that are moved; None: the same
    elementwise: Elementwise = PLAIN
    bits: LinearBits = LinearBits()
    shard: Shard = WHOLE
    stage: Stage = ONE_STAGE
    part: WrapSource = unwrapped  # gives the weights of a stage alone
    divide: WrapSource = unwrapped  # adds the collectives of a rank
    wrap: WrapPart = unwrapped  # adds something to every layer's part, such as LoRA adapters
    check_added: CheckAdded = nothing_added

    def wrapped(self, source: WeightSource) -> WeightSource:
        """Returns the source that a model of this target is built from."""
        return self.divide(self.wrap(self.part(source), self.shard))

    @property
    def free_bytes(self) -> int:
        return available_memory_bytes() if self.memory_bytes is None else self.memory_bytes

    def check_room(self, size_bytes: int, dtype: torch.dtype) -> None:
        """Refuses weights that are larger than the free memory, before any is read."""
        if size_bytes > (free_bytes := self.free_bytes):
            raise ConfigError(
                f"the model's weights need {size_bytes / GIB:.3f} GiB as "
                f"{str(dtype).removeprefix('torch.')}, but only {free_bytes / GIB:.3f} GiB are "
                "available; take a smaller dtype or a smaller model"
            )


HOST = Target()
