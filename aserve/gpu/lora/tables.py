"""The adapters on the device, by slot, and the linear layers that add them.

The tables are allocated while the model is built, so that captured graphs find them where they are.
They are written on the executor's stream only, between two steps: a step that is in flight has the
adapters of its launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp
from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.lora.adapter import LoraAdapter, LoraModule, read_adapter
from aserve.gpu.models.registry import Code
from aserve.gpu.sampling.params import RowTables
from aserve.gpu.weights.checkpoint import Rename
from aserve.gpu.weights.files import listed
from aserve.gpu.weights.renamed import older_name
from aserve.gpu.weights.source import WHOLE, Shard, WeightSource
from aserve.messages.base import GIB
from aserve_kernels.lora import LoraStack, add_lora_ref
from aserve_kernels.row_columns import INT_COLUMNS

LORA_SLOT = INT_COLUMNS.index("lora_slot")
WITHOUT_ADAPTERS = ("lm_head", "visual.")

# Adds each token's adapter to y [tokens, out] in place: see aserve_kernels.lora.add_lora_ref.
AddLora: TypeAlias = Callable[[Tensor, Tensor, Tensor, LoraStack], None]


def may_have_any(_slots: Tensor) -> bool:
    """Returns the answer of devices on which looking would make the host wait."""
    return True


@dataclass(frozen=True, slots=True)
class LoraOps:
    """`has_any` says whether a token of a forward has an adapter; slots int64 [tokens]. Without one
    nothing is added."""

    add: AddLora = add_lora_ref
    has_any: Callable[[Tensor], bool] = may_have_any


MakeLoraOps: TypeAlias = Callable[[], LoraOps]  # may compile them


class LoraTables:
    """`token_slots`, int64 [tokens], are the slots of the current forward's tokens, or None if none
    of them has an adapter. The runner writes them through `bind` before each forward."""

    __slots__ = (
        *("_layers", "_orders", "_own_name", "_shard"),
        *("max_loras", "max_rank", "ops", "token_slots"),
    )

    def __init__(
        self,
        *,
        max_loras: int,
        max_rank: int,
        ops: LoraOps | None = None,
        own_name: Rename = older_name,
    ) -> None:
        """`own_name` returns the name that the model has for a tensor of the checkpoint."""
        self._own_name = own_name
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.ops = ops or LoraOps()
        self.token_slots: Tensor | None = None
        self._layers: list[tuple[tuple[str, ...], LoraStack]] = []  # with the names of their parts
        self._orders: dict[str, Tensor] = {}  # of a layer's rows, by its name: see note_order
        self._shard = WHOLE

    def wrap(self, source: WeightSource, shard: Shard = WHOLE) -> WeightSource:
        """Returns the source of a model, or of a rank's part, whose linear layers add adapters."""
        self._shard = shard
        return _LoraSource(source, self)

    def check_room(
        self, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, left_bytes: int
    ) -> None:
        """Refuses tables that are larger than the memory beside the weights, before any is made.
        `shapes` are those of the weights of linear layers, by name."""
        numbers = sum(sum(s) for name, s in shapes.items() if not name.startswith(WITHOUT_ADAPTERS))
        size_bytes = (1 + self.max_loras) * self.max_rank * numbers * dtype.itemsize
        if size_bytes > left_bytes:
            raise ConfigError(
                f"--max-loras {self.max_loras} adapters of --max-lora-rank {self.max_rank} take "
                f"{size_bytes / GIB:,.3f} GiB, and {left_bytes / GIB:,.3f} GiB are available "
                "beside the weights; lower one of them",
                param="max_loras",
            )

    def add_layer(
        self,
        parts: Mapping[str, int],
        in_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LoraStack:
        """Allocates the stacks of one layer. `parts` maps the names of the joined layers to their
        numbers of rows."""
        num_slots, num_out = 1 + self.max_loras, sum(parts.values())
        sizes = list(parts.values())
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        stack = LoraStack(
            a=zeros((num_slots, len(parts), self.max_rank, in_features)),
            b=zeros((num_slots, self.max_rank, num_out)),
            ranks=np.zeros((num_slots, len(parts)), np.int64),
            part_of=torch.from_numpy(np.repeat(np.arange(len(parts), dtype=np.int32), sizes)).to(
                device
            ),
            bounds=np.cumsum([0, *sizes], dtype=np.int64),
        )
        self._layers.append((tuple(parts), stack))
        return stack

    def note_order(self, parts: Mapping[str, int], row_order: Tensor) -> None:
        """Notes the order of the rows of joined layers, as `WeightSource.linear` has it."""
        orders = row_order.split([*parts.values()])
        starts = np.cumsum([0, *parts.values()])
        for name, order, start in zip(parts, orders, starts, strict=False):
            self._orders[name] = order - int(start)

    def bind(self, tables: RowTables, token_rows: Tensor) -> None:
        """Looks up the slots of a forward's tokens; token_rows int64 [tokens]."""
        slots = tables.int_table[:, LORA_SLOT].index_select(0, token_rows)
        self.token_slots = slots if self.ops.has_any(slots) else None

    def slots_of(self, x: Tensor) -> Tensor:
        """Returns the slots of the forward's tokens, int64 [tokens]; x [tokens, hidden]."""
        if self.token_slots is None:
            return x.new_zeros(len(x), dtype=torch.int64)
        return self.token_slots

    @contextlib.contextmanager
    def bound(self, slots: Tensor) -> Iterator[None]:
        """Within it, layers get tokens of these slots in place of the forward's own."""
        own = self.token_slots
        self.token_slots = slots if self.ops.has_any(slots) else None
        try:
            yield
        finally:
            self.token_slots = own

    def read(self, directory: Path) -> LoraAdapter:
        """Reads an adapter and checks that each of its modules fits a layer. Of each module it
        returns what is of this rank's part. It changes nothing, so any thread may call it."""
        adapter = read_adapter(directory, max_rank=self.max_rank, own_name=self._own_name)
        sizes = {
            name: (int(rows), stack.a.shape[3])
            for names, stack in self._layers
            for name, rows in zip(names, np.diff(stack.bounds), strict=True)
        }
        if unknown := adapter.modules.keys() - sizes.keys():
            raise ConfigError(f"{directory}: this model takes no adapters for {listed(unknown)}")
        for name, module in adapter.modules.items():
            shape = (len(module.b), module.a.shape[1])
            whole = self._shard.whole_shape(f"{name}.weight", sizes[name])
            if shape != whole:
                raise ConfigError(
                    f"{directory}: {name} is for a weight of {shape[0]} x {shape[1]}, but the "
                    f"model's has {whole[0]} x {whole[1]}"
                )
        return LoraAdapter(
            {name: self._part(name, sizes[name], each) for name, each in adapter.modules.items()}
        )

    def _part(self, name: str, size: tuple[int, int], module: LoraModule) -> LoraModule:
        """Returns what a weight of `size` takes of the change of the whole weight."""
        pieces = self._shard.pieces(f"{name}.weight", size)
        columns = pieces[0][1]  # no sections are divided along this axis
        b = torch.cat([module.b[rows] for rows, _ in pieces])
        order = self._orders.get(name)
        return LoraModule(module.a[:, columns], b if order is None else b[order])

    def write(self, slot: int, adapter: LoraAdapter) -> None:
        """Replaces the adapter of a slot. Call it on the executor's stream."""
        for names, stack in self._layers:
            stack.a[slot].zero_()
            stack.b[slot].zero_()
            for part, name in enumerate(names):
                module = adapter.modules.get(name)
                rank = 0 if module is None else len(module.a)
                stack.ranks[slot, part] = rank
                if module is not None:
                    columns = slice(int(stack.bounds[part]), int(stack.bounds[part + 1]))
                    stack.a[slot, part, :rank].copy_(module.a)
                    stack.b[slot, :rank, columns].copy_(module.b.t())


def refuse_adapters(code: Code) -> None:
    """Raises ConfigError for a model whose layers take no adapters."""
    if code.name != "native":
        raise ConfigError(
            f"--enable-lora needs a model with native code; this one has {code.name} code "
            f"({code.why})",
            param="enable_lora",
        )


class LoraLinear:
    """A linear layer with the adapters of the current forward's tokens: y = W x + B A x."""

    __slots__ = ("base", "stack", "tables")

    def __init__(self, base: LinearOp, stack: LoraStack, tables: LoraTables) -> None:
        self.base = base
        self.stack = stack
        self.tables = tables

    def __call__(self, x: Tensor, /) -> Tensor:
        y = self.base(x)
        slots = self.tables.token_slots
        if slots is not None:
            self.tables.ops.add(y, x, slots, self.stack)
        return y


class _LoraSource:
    """A `WeightSource` whose linear layers add adapters, except the LM head, which sees only some
    of a forward's tokens, and those of a vision encoder, which sees patches."""

    __slots__ = ("_source", "_tables", "device", "dtype", "elementwise")

    def __init__(self, source: WeightSource, tables: LoraTables) -> None:
        self._source = source
        self._tables = tables
        self.device = source.device
        self.dtype = source.dtype
        self.elementwise = source.elementwise

    def linear(
        self,
        parts: Mapping[str, int],
        *,
        in_features: int,
        bias: bool,
        row_order: Tensor | None = None,
    ) -> LinearOp:
        base = self._source.linear(parts, in_features=in_features, bias=bias, row_order=row_order)
        if any(name.startswith(WITHOUT_ADAPTERS) for name in parts):
            return base
        # A layer of another pipeline stage is on the meta device, and so are its stacks: all stages
        # check an adapter in the same way, and each of them keeps the part that it has.
        is_elsewhere = isinstance(base, Linear) and base.weight.is_meta
        device = torch.device("meta") if is_elsewhere else self.device
        stack = self._tables.add_layer(parts, in_features, dtype=self.dtype, device=device)
        if row_order is not None:
            self._tables.note_order(parts, row_order)
        return LoraLinear(base, stack, self._tables)

    def tensor(
        self, name: str, shape: tuple[int, ...], *, offset: float = 0.0, is_wide: bool = False
    ) -> Tensor:
        return self._source.tensor(name, shape, offset=offset, is_wide=is_wide)

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        return self._source.number(names, default=default)

    def stacked(
        self, name: str, parts: Mapping[str, int], *, count: int, in_features: int
    ) -> ExpertWeights:
        return self._source.stacked(name, parts, count=count, in_features=in_features)

    def grouped(self, weights: ExpertWeights, biases: Tensor | None = None) -> GroupedLinearOp:
        return self._source.grouped(weights, biases)

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        return self._source.tied_linear(name, weight)
