"""The paged KV of every layer group, its page tables, and the token ids that lie beside it.

It knows no step: slots and pages come from who calls. Written on the executor's stream only, in
order: page tables at a step's head, token ids after them, keys and values in the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from aserve.gpu.kv.layer_groups import LayerGroup
from aserve.gpu.kv.store import RopeAndStoreKv, Scales, plain_bytes, rope_then_store_kv, widened
from aserve.gpu.layers.rope import RopeInputs
from aserve.messages.executor import GroupSpec


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's part of its group's pool: views [num_pages * page_size, kv_heads, head_dim]."""

    group: int
    keys: Tensor
    values: Tensor
    scales: Scales  # what is stored is multiplied by them: 1 where it has more than eight bits
    store: RopeAndStoreKv

    def rope_and_store_kv(self, heads: Tensor, rope: RopeInputs | None, slots: Tensor) -> Tensor:
        """heads [tokens, heads + 2 * kv_heads, head_dim]: queries, keys and values; slots int64
        [tokens] -> the queries [tokens, heads, head_dim], turned as the stored keys are."""
        return self.store(heads, rope, slots, (self.keys, self.values), self.scales)

    def read(self, pick: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `pick` takes of keys and of values, as it was before it was stored."""
        pools = zip((self.keys, self.values), self.scales, strict=True)
        keys, values = (widened(pick(pool), dtype, scale) for pool, scale in pools)
        return keys, values


Zeros: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class KvOps:
    """How a device makes pools, if it has a way of its own, and how it writes into them."""

    zeros: Zeros | None = None
    store: RopeAndStoreKv = rope_then_store_kv


TORCH_KV_OPS = KvOps()


class KvPools:
    """`page_tables`: int64 [max_rows + 1, max_pages_per_row], one per group; entry 0 where nothing
    is. `token_pool`: int32 [slots of group 0]."""

    __slots__ = (
        "_keys",
        "_values",
        "layers",
        "num_pages",
        "page_size",
        "page_tables",
        "token_pool",
    )

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        specs: tuple[GroupSpec, ...],
        *,
        page_size: int,
        table_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        ops: KvOps = TORCH_KV_OPS,
    ) -> None:
        """`dtype` is that of keys and values."""
        self.page_size = page_size
        self.num_pages = tuple(spec.num_pages for spec in specs)
        self.token_pool = torch.zeros(
            specs[0].num_pages * page_size, dtype=torch.int32, device=device
        )
        self.page_tables = tuple(
            torch.zeros(table_shape, dtype=torch.int64, device=device) for _ in specs
        )
        shapes = [
            _pool_shape(group, spec, page_size) for group, spec in zip(groups, specs, strict=True)
        ]
        make = ops.zeros or partial(_zeros_on, device)
        self._keys = tuple(make(shape, dtype) for shape in shapes)
        self._values = tuple(make(shape, dtype) for shape in shapes)
        self.layers = {
            layer.index: LayerKv(
                number,
                self._keys[number][place],
                self._values[number][place],
                scales=layer.kv_scales if dtype.itemsize == 1 else (1.0, 1.0),
                store=ops.store,
            )
            for number, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }

    @property
    def device(self) -> torch.device:
        return self.token_pool.device

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._keys[0].dtype

    @property
    def size_bytes(self) -> int:
        return sum(pool.nbytes for pool in (*self._keys, *self._values, self.token_pool))

    def forget(self, rows: Tensor) -> None:
        """rows int64 [n] have new tenants. What reads or writes beyond their pages meets page 0."""
        for table in self.page_tables:
            table.index_fill_(0, rows, 0)

    def write_pages(self, group: int, *, rows: Tensor, columns: Tensor, pages: Tensor) -> None:
        """All int64 [n]."""
        self.page_tables[group].index_put_((rows, columns), pages)

    def clear(self, group: int, pages: Tensor) -> None:
        """Empties pages, int64 [n], that have a new owner and no content yet.

        WHY: attention reads whole pages and masks what lies behind a row's length, but a NaN that a
        former owner left there would go through the mask.
        """
        for pool in (self._keys[group], self._values[group]):
            sizes = (self.num_pages[group], self.page_size)
            by_page = plain_bytes(pool).unflatten(1, sizes)
            by_page.index_fill_(1, pages, 0)

    def slots(self, group: int, rows: Tensor, positions: Tensor) -> Tensor:
        """rows, positions int64 [n] -> int64 [n], the slots of those positions."""
        columns = torch.div(positions, self.page_size, rounding_mode="floor")
        pages = self.page_tables[group][rows, columns]
        return pages.mul_(self.page_size).add_(positions.remainder(self.page_size))

    def token_ids(self, rows: Tensor, *, max_len: int) -> Tensor:
        """rows int64 [n] -> their tokens int64 [n, >= max_len], any value beyond a row's length."""
        pages = self.page_tables[0][rows, : -(-max_len // self.page_size)]
        ids = self.token_pool.view(-1, self.page_size).index_select(0, pages.flatten())
        return ids.view(len(rows), -1).to(torch.int64)


def _zeros_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _pool_shape(group: LayerGroup, spec: GroupSpec, page_size: int) -> tuple[int, int, int, int]:
    layout = group.layout(dtype_bytes=0)
    num_slots = spec.num_pages * page_size
    return layout.num_layers, num_slots, layout.num_kv_heads, layout.head_dim
