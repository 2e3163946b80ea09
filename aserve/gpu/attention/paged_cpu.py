"""Attention by a compiled kernel that reads the page table where it is: the default on the CPU.

Long prompts that start here go through torch's products of the step's own keys and values.
It knows no model. Written: only the keys and values of the forward's own slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import AttentionKind
from aserve.gpu.attention.capabilities import AttentionSite, Capabilities
from aserve.gpu.attention.fresh_prompt import choose_fresh_prompt
from aserve.gpu.forward_batch import ForwardBatch
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.layers.rotary import Turn
from aserve.gpu.models.attend import Attend
from aserve.gpu.models.layer_spec import LayerSpec
from aserve_kernels.cpu.paged_attention import (
    PagedRows,
    RowSpans,
    Scoring,
    compile_paged_attention,
    paged_attention,
)

# PERF: tokens of a fresh prompt from which torch's products take less time. CPU time of one thread
# at 1,024 tokens of Qwen3-0.6B's heads: 64 ms against 95 in float32, 34 against 90 in bfloat16.
LONG = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a forward: per layer group for the kernel, and those that are left to torch."""

    paged: tuple[PagedRows, ...]
    fresh: tuple[slice, ...]  # the tokens of each


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """`split` leaves long fresh rows to torch, where a layer's mathematics are within its reach."""

    every: Part
    split: Part


class PagedCpu:
    __slots__ = ("_fresh_prompt", "_long", "_num_workers", "_pools", "_tables")
    static_plans = None

    def __init__(self, pools: KvPools, *, long: float = LONG) -> None:
        """`long`: tokens of a fresh prompt from which it is left to torch."""
        self._pools = pools
        self._long = long
        self._tables = tuple(table.numpy() for table in pools.page_tables)
        self._fresh_prompt = choose_fresh_prompt(pools.dtype)
        self._num_workers = torch.get_num_threads()
        compile_paged_attention(pools.dtype, self._num_workers)

    def plan(self, batch: ForwardBatch) -> object:
        spans = batch.spans_cpu.astype(np.int64)
        lens, starts = batch.lens.numpy(), batch.query_starts.numpy()[:-1]
        rows = batch.rows.numpy()
        is_fresh = (lens == spans) & (spans >= self._long)

        def part(is_paged: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Part:
            own = RowSpans(rows[is_paged], lens[is_paged], starts[is_paged], spans[is_paged])
            left = zip(starts[~is_paged], spans[~is_paged], strict=True)
            return Part(
                tuple(PagedRows(table, self._pools.page_size, own) for table in self._tables),
                tuple(slice(int(start), int(start + span)) for start, span in left),
            )

        return CpuPlan(part(np.ones_like(is_fresh)), part(~is_fresh))

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        if not isinstance(plan, CpuPlan):
            raise BugError(f"step {batch.iteration}: a plan of another backend: {plan!r}")
        longest = int(batch.spans_cpu.max(initial=0))

        def attend(layer: LayerSpec, heads: Tensor, turn: Turn | None) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.turn_and_store(heads, turn, batch.slots[kv.group])
            sees_all = layer.window is None or layer.window >= longest
            part = plan.split if sees_all and layer.softcap is None else plan.every
            out = torch.empty(q.shape, dtype=q.dtype)
            for tokens in part.fresh:
                slots = batch.slots[kv.group][tokens]
                own = (pool.index_select(0, slots) for pool in (kv.keys, kv.values))
                out[tokens] = self._fresh_prompt(q[tokens], *own, scale=layer.scale)
            scoring = Scoring(layer.scale, layer.window, layer.softcap)
            rows, workers = part.paged[kv.group], self._num_workers
            paged_attention(q, kv.keys, kv.values, rows, scoring, out=out, num_workers=workers)
            return out

        return attend


def _build(site: AttentionSite) -> PagedCpu:
    """The kernel gives a token the same bits in any step; torch's products do not."""
    return PagedCpu(site.pools, long=math.inf if site.is_deterministic else LONG)


KIND = AttentionKind(
    Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        deterministic=True,
    ),
    _build,
)
