"""The paged KV pools of every layer group, their page tables, and the pool of token ids.

Slots and pages are chosen by the scheduler and the step. Pools are written on the executor's stream
only, in this order: page tables at the head of a step, token ids after them, keys and values in the
forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerGroup, LayerSpec
from aserve.gpu.kv.store import (
    RopeAndStoreKv,
    Scales,
    byte_view,
    from_kv_dtype,
    rope_then_store_kv,
    store_latents,
)
from aserve.gpu.layers.rope import apply_rope
from aserve.messages.executor import GroupSpec


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's KV: views [num_pages * page_size, kv_heads, head_dim] of its group's pools.

    For a layer of latents, `values` is a view of the first elements of `keys`.
    """

    group: int
    keys: Tensor
    values: Tensor
    scales: Scales  # stored elements are multiplied by these; 1 unless KV is stored in fp8
    store: RopeAndStoreKv

    def rope_and_store_kv(self, layer: LayerSpec, inputs: AttentionInputs, slots: Tensor) -> Tensor:
        """Applies rope to queries and keys and stores what the layer stores in `slots`, int64
        [tokens]. Returns the queries [tokens, num_heads, head_dim]."""
        heads, rope = inputs.heads, inputs.rope
        if layer.kv_layer is None and layer.value_dim is None:
            return self.store(heads, rope, slots, (self.keys, self.values), self.scales)
        if rope is not None:
            heads = apply_rope(heads, rope)
        if layer.kv_layer is not None:
            return heads
        return store_latents(heads, slots, self.keys, self.scales[0])

    def read(self, pick: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that `pick` selects from a pool, converted to `dtype`."""
        pools = zip((self.keys, self.values), self.scales, strict=True)
        keys, values = (from_kv_dtype(pick(pool), dtype, scale) for pool, scale in pools)
        return keys, values


Zeros: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class KvOps:
    """The operators by which a device allocates pools and writes into them."""

    zeros: Zeros | None = None  # None: torch.zeros
    store: RopeAndStoreKv = rope_then_store_kv


TORCH_KV_OPS = KvOps()


class KvPools:
    """`page_tables`: int64 [max_rows + 1, max_pages_per_row], one per group; unused entries are 0.
    `token_pool`: int32 [slots of group 0], the token id of each slot. `index_keys`: [slots, index
    dim], by layer; those that sparse attention keeps in the slots of its latents."""

    __slots__ = (
        *("_ops", "_pools", "index_keys", "layers", "num_pages"),
        *("page_size", "page_tables", "token_pool"),
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
        """`dtype` is the dtype of keys and values."""
        self.page_size = page_size
        self.num_pages = tuple(spec.num_pages for spec in specs)
        self.token_pool = torch.zeros(
            specs[0].num_pages * page_size, dtype=torch.int32, device=device
        )
        self.page_tables = tuple(
            torch.zeros(table_shape, dtype=torch.int64, device=device) for _ in specs
        )
        self._ops = ops
        self.layers: dict[int, LayerKv] = {}
        self._allocate(groups, specs, dtype)

    def _allocate(
        self, groups: tuple[LayerGroup, ...], specs: tuple[GroupSpec, ...], dtype: torch.dtype
    ) -> None:
        self.index_keys: dict[int, Tensor] = {}
        zeros = self._ops.zeros or partial(_zeros_on, self.device)
        # per group keys and values, or latents alone: [layers, slots, kv_heads, head_dim]
        self._pools: list[tuple[Tensor, ...]] = []
        for number, (group, spec) in enumerate(zip(groups, specs, strict=True)):
            layout, num_slots = group.layout(dtype_bytes=0), spec.num_pages * self.page_size
            shape = (layout.num_layers, num_slots, layout.num_kv_heads, layout.head_dim)
            stored = group.storing_layers
            value_dim = stored[0].value_dim if stored else None
            keys = zeros(shape, dtype)
            values = zeros(shape, dtype) if value_dim is None else keys[..., :value_dim]
            self._pools.append((keys, values) if value_dim is None else (keys,))
            for place, layer in enumerate(stored):
                scales = layer.kv_scales if dtype.itemsize == 1 else (1.0, 1.0)
                self.layers[layer.index] = LayerKv(
                    number, keys[place], values[place], scales, self._ops.store
                )
        self.layers |= _shared(groups, self.layers)

    def beside(
        self, groups: tuple[LayerGroup, ...], specs: tuple[GroupSpec, ...], dtype: torch.dtype
    ) -> KvPools:
        """Pools for the layers of a second model, over the same page tables and token ids. `specs`
        are those of these pools; a group of the second model has the window of one of them. A
        layer of the second model that names a `kv_layer` reads that layer of the first model.
        """
        by_window = {group.window: group for group in groups}
        if unknown := by_window.keys() - {spec.window for spec in specs}:
            raise ConfigError(
                f"the drafter has layers with windows {unknown}, but the model has none: a drafter "
                "shares the model's page tables; use a drafter with the model's windows"
            )
        pools = object.__new__(KvPools)
        pools.page_size, pools.num_pages = self.page_size, self.num_pages
        pools.page_tables, pools.token_pool = self.page_tables, self.token_pool
        pools._ops, pools.layers = self._ops, dict(self.layers)
        own = tuple(by_window.get(spec.window, LayerGroup(spec.window, ())) for spec in specs)
        pools._allocate(own, specs, dtype)
        return pools

    @property
    def device(self) -> torch.device:
        return self.token_pool.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._pools[0][0].dtype

    @property
    def size_bytes(self) -> int:
        stored = (pool for pools in self._pools for pool in pools)
        return self.token_pool.nbytes + sum(pool.nbytes for pool in stored)

    def forget(self, rows: Tensor) -> None:
        """Clears the page-table entries of rows, int64 [n], that were given to new requests. Reads
        and writes beyond the pages of such a request then go to page 0."""
        for table in self.page_tables:
            table.index_fill_(0, rows, 0)

    def write_pages(self, group: int, *, rows: Tensor, columns: Tensor, pages: Tensor) -> None:
        """Sets page-table entries. All arguments are int64 [n]."""
        self.page_tables[group].index_put_((rows, columns), pages)

    def clear(self, group: int, pages: Tensor) -> None:
        """Zeroes pages, int64 [n], that were just given to a row and are not written yet.

        WHY: some backends read whole pages and mask what is beyond a row's length. A NaN that an
        earlier request left there would pass through the mask.
        """
        sizes = (self.num_pages[group], self.page_size)
        for pool in self.pools_of(group):
            byte_view(pool).unflatten(1, sizes).index_fill_(1, pages, 0)

    def move(self, from_slots: tuple[Tensor, ...], to_slots: tuple[Tensor, ...]) -> None:
        """Copies the KV and the token ids of some slots to other slots, int64 [n] per layer group.

        This compacts the accepted path of a draft tree, whose tokens are scattered among rejected
        ones. All slots are read before the first is written, so both sets may overlap.
        """
        for group, (sources, targets) in enumerate(zip(from_slots, to_slots, strict=True)):
            for pool in self.pools_of(group):
                stored = byte_view(pool)
                stored.index_copy_(1, targets, stored.index_select(1, sources))
        ids = self.token_pool.index_select(0, from_slots[0])
        self.token_pool.index_copy_(0, to_slots[0], ids)

    def slots(self, group: int, rows: Tensor, positions: Tensor) -> Tensor:
        """Returns the slots of these positions. All tensors are int64 [n]."""
        columns = torch.div(positions, self.page_size, rounding_mode="floor")
        pages = self.page_tables[group][rows, columns]
        return pages.mul_(self.page_size).add_(positions.remainder(self.page_size))

    def token_ids(self, rows: Tensor, *, max_len: int) -> Tensor:
        """Returns the tokens of rows, int64 [n], as int64 [n, >= max_len]. Values beyond a row's
        length are arbitrary.
        """
        pages = self.page_tables[0][rows, : -(-max_len // self.page_size)]
        ids = self.token_pool.view(-1, self.page_size).index_select(0, pages.flatten())
        return ids.view(len(rows), pages.shape[1] * self.page_size).to(torch.int64)

    def pools_of(self, group: int) -> tuple[Tensor, ...]:
        """Returns the allocations of one group: keys and values, or latents alone."""
        return self._pools[group]


def _shared(groups: tuple[LayerGroup, ...], layers: dict[int, LayerKv]) -> dict[int, LayerKv]:
    """Returns the KV of layers that read another layer's, by layer index."""
    shared: dict[int, LayerKv] = {}
    for number, group in enumerate(groups):
        for layer in group.layers:
            if layer.kv_layer is None:
                continue
            kv = layers.get(layer.kv_layer)
            if kv is None or kv.group != number:
                raise ConfigError(
                    f"layer {layer.index} reads the KV of layer {layer.kv_layer}, which must store "
                    f"KV in the same layer group ({group.name})"
                )
            shared[layer.index] = kv
    return shared


def _zeros_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
