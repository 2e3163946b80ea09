"""Attention in two levels, for rows that share their first pages: those are read once for all
queries, then each row reads the rest of its own, and the two results are merged.

It knows no layer by itself. Written: its own workspaces, in turn.
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
from aserve.gpu.attention.flashinfer.page_indices import list_pages
from aserve.gpu.attention.flashinfer.plan_buffers import PlanSlots
from aserve.gpu.attention.flashinfer.wrappers import FP8, Arrays, CascadeWrapper, Problem, Wrappers
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import ArrayI32

# PERF: the least of KV that need not be read, in bytes for each of a forward's layers. Two levels
# cost two kernels more in a layer; and a decode step is then not replayed but launched, some 15
# calls a layer, which take the host about 100 us. Reading these bytes takes a device 80 us (at 3.3
# TB/s), and with the rest of its layer more than those calls: so even a step that waits for the
# host is no slower, and where the host is ahead, launches are hidden.
MIN_SAVED_BYTES = 256 << 20
ARRAYS = tuple(field.name for field in dataclasses.fields(Arrays))
GROUP = 0  # of layers without a window: what a batch names is of their pages


@dataclass(frozen=True, slots=True)
class Level:
    """The pages of the batch's first `num_rows` rows from `column` of the page table on: of one row
    for what all have in common, then of each row. int32, on the device."""

    num_rows: int
    column: int
    starts: Tensor  # [num_rows + 1]
    pages: Tensor  # written when the forward begins


@dataclass(frozen=True, slots=True)
class CascadePlan:
    levels: tuple[Level, ...]
    wrappers: Mapping[Problem, CascadeWrapper]

    def list_pages(self, batch: ForwardBatch, table: Tensor, gather: Callable[..., None]) -> None:
        for level in self.levels:
            rows = batch.rows[: level.num_rows]
            firsts = torch.full_like(rows, level.column, dtype=torch.int32)
            gather(table, rows, first_columns=firsts, indptr=level.starts, out=level.pages)


NO_CASCADE = CascadePlan((), {})


class Cascades:
    """Plans for those layers that can."""

    __slots__ = ("_bytes_per_token", "_problems", "_site", "_slots", "_wrappers")

    def __init__(
        self, wrappers: Wrappers, site: AttentionSite, problems: Iterable[Problem]
    ) -> None:
        # It takes no scales, which eight-bit KV has.
        capabilities = site.pools.dtype != FP8
        self._wrappers = wrappers
        self._site = site
        self._problems = tuple(
            problem for problem in problems if capabilities and problem.group == GROUP
        )
        layers = site.groups[GROUP].layers if self._problems else ()
        values = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
        self._bytes_per_token = values * site.pools.dtype.itemsize / max(len(site.layers), 1)
        self._slots = PlanSlots[Problem, CascadeWrapper](site.device, site.num_plans)

    def is_worthwhile(self, num_rows: int, shared_pages: int) -> bool:
        shared_tokens = shared_pages * self._site.pools.page_size
        return is_worthwhile(num_rows, shared_tokens, bytes_per_token=self._bytes_per_token)

    def plan(self, batch: ForwardBatch, lens: ArrayI32) -> CascadePlan:
        """lens [rows], exact, with this forward's tokens: more than `batch.shared_pages` hold."""
        slot = self._slots.take()
        host = slot.write(self._host_arrays(batch, lens))
        device, where = self._site.device, self._site.pools.device
        arrays = [Arrays(*(host[f"{what}{level}"] for what in ARRAYS)) for level in range(2)]
        levels = tuple(
            Level(
                num_rows=len(of_level.last_lens),
                column=column,
                starts=device.stage(of_level.starts),
                pages=torch.empty(int(of_level.starts[-1]), dtype=torch.int32, device=where),
            )
            for of_level, column in zip(arrays, (0, batch.shared_pages), strict=True)
        )
        for problem in self._problems:
            if problem not in slot.wrappers:
                slot.wrappers[problem] = self._wrappers.make_cascade(len(levels))
            pages = [level.pages for level in levels]
            self._wrappers.plan_cascade(slot.wrappers[problem], problem, arrays, pages=pages)
        slot.close()
        return CascadePlan(levels, dict(slot.wrappers))

    def _host_arrays(self, batch: ForwardBatch, lens: ArrayI32) -> dict[str, ArrayI32]:
        num_rows, num_shared = batch.num_rows, batch.shared_pages
        page_size = self._site.pools.page_size
        own = list_pages(lens, batch.query_lens_cpu, window=None, page_size=page_size)
        cu_query_lens = np.zeros(num_rows + 1, np.int32)
        np.cumsum(batch.query_lens_cpu, out=cu_query_lens[1:])
        return {
            "cu_query_lens0": cu_query_lens[[0, -1]],
            "starts0": np.array([0, num_shared], np.int32),
            "last_lens0": np.array([page_size], np.int32),
            "lens0": np.array([num_shared * page_size], np.int32),
            "cu_query_lens1": cu_query_lens,
            "starts1": own.starts - num_shared * np.arange(num_rows + 1, dtype=np.int32),
            "last_lens1": own.last_lens,
            "lens1": own.lens - num_shared * page_size,
        }


def is_worthwhile(num_rows: int, shared_tokens: int, *, bytes_per_token: float) -> bool:
    """`bytes_per_token`: of the KV that is read once, on the average of all layers."""
    return (num_rows - 1) * shared_tokens * bytes_per_token >= MIN_SAVED_BYTES
