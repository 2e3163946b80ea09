"""Cascade attention for rows that share their first pages.

Level 0 attends to the shared pages once, with the queries of all rows as one row. Level 1 attends
to the rest of each row. The two results are merged by their log-sum-exps.
Source: https://flashinfer.ai/2024/02/02/cascade-inference.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.flashinfer.page_indices import page_indptr
from aserve.gpu.attention.flashinfer.plan_buffers import PlanSlots
from aserve.gpu.attention.flashinfer.wrappers import (
    CascadeWrapper,
    LayerKind,
    PlanArrays,
    Wrappers,
)
from aserve.gpu.kv.store import FP8
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import ArrayI32

# The minimum number of KV bytes per layer that cascade attention must save. NOTE: an estimate. A
# decode step with a cascade is not replayed as a whole: its forward runs in pieces
# (cudagraph/forwards.py), and between two pieces the host launches the store, the two levels, their
# merge and a copy, which takes it about 50 us per layer. Reading these bytes takes a device 80 us
# (at 3.3 TB/s). So a step that waits for the host is no slower, and where the host is ahead, its
# launches are hidden. Without captured forwards a layer has some 15 launches, which take about as
# long as reading these bytes and the layer's weights.
MIN_SAVED_BYTES = 256 << 20
ARRAYS = tuple(field.name for field in dataclasses.fields(PlanArrays))
GROUP = 0  # the layer group without a window, whose pages ForwardBatch.shared_pages counts


@dataclass(frozen=True, slots=True)
class Level:
    """The pages of one level: those of the batch's first `num_rows` rows, from column
    `first_column` of the page table on. Level 0 has one row. Tensors are int32 on the device."""

    num_rows: int
    first_column: int
    indptr: Tensor  # [num_rows + 1]
    indices: Tensor  # written when the forward begins


@dataclass(frozen=True, slots=True)
class CascadePlan:
    levels: tuple[Level, ...]
    wrappers: Mapping[LayerKind, CascadeWrapper]

    def write_indices(
        self, batch: ForwardBatch, page_table: Tensor, kv_indices: Callable[..., None]
    ) -> None:
        for level in self.levels:
            rows = batch.rows[: level.num_rows]
            columns = torch.full_like(rows, level.first_column, dtype=torch.int32)
            kv_indices(
                page_table, rows, first_columns=columns, indptr=level.indptr, out=level.indices
            )


NO_CASCADE = CascadePlan((), {})


class Cascades:
    """Plans cascade attention for the layers that support it: those without a window and without
    latents, unless KV is stored in fp8."""

    __slots__ = ("_bytes_per_token", "_kinds", "_site", "_slots", "_wrappers")

    def __init__(self, wrappers: Wrappers, site: AttentionSite, kinds: Iterable[LayerKind]) -> None:
        # A CascadeWrapper passes no KV scales, which KV in fp8 needs.
        is_supported = site.pools.dtype != FP8
        self._wrappers = wrappers
        self._site = site
        self._kinds = tuple(
            kind
            for kind in kinds
            if is_supported and kind.group == GROUP and kind.layer.value_dim is None
        )
        layers = site.groups[GROUP].layers if self._kinds else ()
        values = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
        self._bytes_per_token = values * site.pools.dtype.itemsize / max(len(site.layers), 1)
        self._slots = PlanSlots[LayerKind, CascadeWrapper](site.device, site.num_plans)

    def is_worthwhile(self, num_rows: int, shared_pages: int) -> bool:
        shared_tokens = shared_pages * self._site.pools.page_size
        return is_worthwhile(num_rows, shared_tokens, bytes_per_token=self._bytes_per_token)

    def plan(self, batch: ForwardBatch, lens: ArrayI32) -> CascadePlan:
        """lens int32 [rows]: exact KV lengths with this forward's tokens. Each row is longer than
        the shared pages."""
        slot = self._slots.take()
        host = slot.write(self._host_arrays(batch, lens))
        device, where = self._site.device, self._site.pools.device
        arrays = [PlanArrays(*(host[f"{name}{level}"] for name in ARRAYS)) for level in range(2)]
        levels = tuple(
            Level(
                num_rows=len(own.last_page_lens),
                first_column=column,
                indptr=device.stage(own.indptr),
                indices=torch.empty(int(own.indptr[-1]), dtype=torch.int32, device=where),
            )
            for own, column in zip(arrays, (0, batch.shared_pages), strict=True)
        )
        for kind in self._kinds:
            if kind not in slot.wrappers:
                slot.wrappers[kind] = self._wrappers.make_cascade(len(levels))
            indices = [level.indices for level in levels]
            self._wrappers.plan_cascade(slot.wrappers[kind], kind, arrays, indices=indices)
        slot.close()
        return CascadePlan(levels, dict(slot.wrappers))

    def _host_arrays(self, batch: ForwardBatch, lens: ArrayI32) -> dict[str, ArrayI32]:
        num_rows, num_shared = batch.num_rows, batch.shared_pages
        page_size = self._site.pools.page_size
        own = page_indptr(lens, batch.query_lens_cpu, window=None, page_size=page_size)
        cu_query_lens = np.zeros(num_rows + 1, np.int32)
        np.cumsum(batch.query_lens_cpu, out=cu_query_lens[1:])
        return {
            "cu_query_lens0": cu_query_lens[[0, -1]],
            "indptr0": np.array([0, num_shared], np.int32),
            "last_page_lens0": np.array([page_size], np.int32),
            "lens0": np.array([num_shared * page_size], np.int32),
            "cu_query_lens1": cu_query_lens,
            "indptr1": own.indptr - num_shared * np.arange(num_rows + 1, dtype=np.int32),
            "last_page_lens1": own.last_page_lens,
            "lens1": own.lens - num_shared * page_size,
        }


def is_worthwhile(num_rows: int, shared_tokens: int, *, bytes_per_token: float) -> bool:
    """bytes_per_token: KV that cascade attention reads once instead of num_rows times, in bytes per
    token, averaged over all layers."""
    return (num_rows - 1) * shared_tokens * bytes_per_token >= MIN_SAVED_BYTES
