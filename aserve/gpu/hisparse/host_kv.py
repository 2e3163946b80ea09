"""KV in the host's memory: the pools, the backup of new rows, and the staging of prompts.

The page tables, and so the prefix cache, retraction and the scheduler's accounts, are those of
other pools: a page is memory of the host. Index keys stay on the device, in the same slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aserve.cache.layout import GroupLayout
from aserve.gpu.hisparse.hot_rows import NOWHERE, HotRows
from aserve.gpu.hisparse.memory import row_bytes
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.kv.pools import KvOps, KvPools, LayerKv
from aserve.gpu.kv.store import to_kv_dtype
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.transfer.pinned import to_device
from aserve.messages.base import KIB, MIB
from aserve.messages.executor import EngineSpec


@dataclass(frozen=True, slots=True)
class NewRows:
    """The latents of the decode rows of one forward that are not in the host's memory yet."""

    slots: Tensor  # int64 [n]
    places: dict[int, Tensor] = field(default_factory=dict)  # in the buffer of each layer


class Backup:
    """Copies new latents to the host, in the order of their forwards.

    A page that was freed may get the tokens of another request, so this order must hold. What is
    not copied yet cannot be read from the host: `flush` comes before a forward that reads rows
    there, and before a row or a page table is given to a new request.
    """

    __slots__ = ("_hot", "_waiting")

    def __init__(self, hot: HotRows) -> None:
        self._hot = hot
        self._waiting: deque[NewRows] = deque()

    def begin(self, batch: ForwardBatch, slots: Tensor) -> NewRows:
        """Begins a forward, whose decode rows have these slots, int64 [n]."""
        if len(self._waiting) >= self._hot.shape.num_pending or (batch.query_lens_cpu != 1).any():
            self.flush()
        self._waiting.append(NewRows(slots))
        return self._waiting[-1]

    def flush(self) -> None:
        while self._waiting:
            new = self._waiting.popleft()
            for index, places in new.places.items():
                self._hot.back_up(index, places, new.slots)


class HostKvPools(KvPools):
    """`KvPools` whose latents are in the host's memory. `hot` and `backup` are set by `open`."""

    __slots__ = ("_layout", "backup", "hot")

    def open(self, hot: HotRows, layout: GroupLayout, ops: KvOps) -> None:
        """`ops` allocate the pools of a drafter, which are the device's."""
        self._layout = layout
        self._ops = ops
        self.hot = hot
        self.backup = Backup(hot)

    @property
    def row_bytes(self) -> int:
        """Bytes on the device of one request's hot rows."""
        return row_bytes(self._layout, self.hot.shape)

    def about(self, spec: EngineSpec) -> str:
        """Describes the memory for the start-up line."""
        host_bytes = sum(kv.keys.nbytes for kv in self.layers.values())
        whole_bytes = spec.max_model_len * self._layout.bytes_per_token
        return (
            f"HiSparse with {self.hot.shape.num_hot} hot rows per request: "
            f"{self.row_bytes / KIB:,.0f} KiB of the device instead of "
            f"{whole_bytes / KIB:,.0f} KiB for a whole context, "
            f"{host_bytes / MIB:,.0f} MiB of KV in the host's memory"
        )

    def forget(self, rows: Tensor) -> None:
        self.backup.flush()
        self.hot.forget(rows)
        super().forget(rows)


class PrefillStaging:
    """The place between the prefill of rows and their decode: a forward's rows with several
    queries, whose latents go to the host as they are computed, chunk by chunk.

    The host then has all of a prompt before its first decode step, which is later on the same
    stream, so no request waits between the two. Attention of such rows would choose nearly all of
    their keys together, so the keys of one layer at a time are copied to the device whole.
    """

    __slots__ = ("_copy", "_first", "_pools", "_rows", "_slots", "_total", "batch")

    def __init__(self, batch: ForwardBatch, pools: HostKvPools) -> None:
        self.batch = batch
        self._pools = pools
        self._copy = pools.hot.copy
        device, bounds = batch.rows.device, batch.len_bounds_cpu.astype(np.int64)
        first = np.cumsum(bounds) - bounds
        of_row = np.repeat(np.arange(len(bounds)), bounds)
        positions = to_device(np.arange(len(of_row)) - first[of_row], device)
        indices = to_device(of_row, device)
        is_key = positions < batch.lens[indices]
        self._slots = pools.slots(0, batch.rows[indices], positions * is_key)
        self._rows = torch.arange(len(of_row), device=device).where(is_key, NOWHERE)
        self._first = to_device(first, device)
        self._total = len(of_row)

    def write(self, layer: LayerSpec, latents: Tensor) -> None:
        """Copies the latents [tokens, 1, r + d_rope] of this forward to the host."""
        kv = self._pools.layers[layer.index]
        stored = to_kv_dtype(latents, kv.keys.dtype, kv.scales[0])
        tokens = torch.arange(len(latents), device=latents.device)
        self._copy(stored, tokens, kv.keys, self.batch.slots[kv.group])

    def read(self, layer: LayerSpec) -> LayerKv:
        """Returns the keys of all rows of one layer, copied from the host, one row behind the
        other. Those behind a row's length are zero."""
        host = self._pools.layers[layer.index]
        shape = (self._total, *host.keys.shape[1:])
        keys = torch.zeros(shape, dtype=host.keys.dtype, device=self._rows.device)
        self._copy(host.keys, self._slots, keys, self._rows)
        return LayerKv(0, keys, keys[..., : layer.out_dim], host.scales, host.store)

    def slots(self, positions: Tensor) -> Tensor:
        """positions int64 [tokens, k] of chosen keys -> their places in what `read` returns."""
        return self._first[self.batch.token_to_row][:, None] + positions
