"""Attention on the CPU for rows with many queries, such as chunks of prompts.

aserve's own kernel (`chunk_attention`) serves most. Where it is not the fastest, or does not exist,
`sdpa_tiles` copies keys and values out of their pages, one tile at a time, and runs torch's fused
kernel on each tile. The partial results of two tiles with outputs o_1, o_2 and log-sum-exps l_1,
l_2 are merged as in flash attention:

    o = o_1 + sigmoid(l_2 - l_1) * (o_2 - o_1)        l = log(exp(l_1) + exp(l_2))

WHY: a copy takes several times as long as reading KV in place, but hundreds of queries share it,
and then it is small beside their products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.device.cpu.isa import chunk_kv_dtype, read_isa
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import Scales, byte_view, from_kv_dtype
from aserve_kernels.cpu.chunk_attention import chunk_attention, compile_chunk_attention
from aserve_kernels.cpu.host_rows import HostRows, QueryRows
from aserve_kernels.cpu.tiles import OUTPUTS
from aserve_kernels.paged_rows import Scoring

TILE = 2048  # keys


def sdpa_tiles(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *, out: Tensor
) -> None:
    """The contract of `paged_attention`, for layers without a soft cap and without a window that is
    shorter than a row."""
    own = rows.queries
    for row, kv_len, start, query_len in zip(
        own.rows, own.lens, own.starts, own.query_lens, strict=True
    ):
        pages = torch.from_numpy(rows.page_table[row])
        scales = (scoring.key_scale, scoring.value_scale)
        kv = _RowKv((keys, values), scales, pages, rows.page_size, q.dtype)
        part = slice(int(start), int(start + query_len))
        out[part] = _attend_row(q[part], kv, int(kv_len), scale=scoring.scale)


def widened_chunks(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *,
    out: Tensor, num_workers: int,
) -> None:  # fmt: skip
    """The contract of `paged_attention`, for queries of bfloat16 and KV of fp8: `chunk_attention`
    of a copy of each row, which multiplies pairs of bfloat16."""
    own, scales = rows.queries, (scoring.key_scale, scoring.value_scale)
    exact = replace(scoring, key_scale=1.0, value_scale=1.0)
    table, first = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)  # the copy is one page
    for index, row in enumerate(own.rows):
        pages, kv_len = torch.from_numpy(rows.page_table[row]), int(own.lens[index])
        copies = _RowKv((keys, values), scales, pages, rows.page_size, q.dtype).read(0, kv_len)
        part = slice(index, index + 1)
        queries = QueryRows(first, own.lens[part], own.starts[part], own.query_lens[part])
        alone = HostRows(table, kv_len, queries)
        chunk_attention(q, *copies, alone, exact, out=out, num_workers=num_workers)


@dataclass(frozen=True, slots=True)
class _RowKv:
    pools: tuple[Tensor, Tensor]  # of keys and of values
    scales: Scales
    pages: Tensor
    page_size: int
    dtype: torch.dtype  # of the copies

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copies of keys and values at positions start..stop: [positions, kv_heads, head_dim]."""
        column = start // self.page_size
        pages = self.pages[column : -(-stop // self.page_size)]
        own = slice(start - column * self.page_size, stop - column * self.page_size)

        def gather(pool: Tensor, scale: float) -> Tensor:
            by_page = byte_view(pool).view(-1, self.page_size, *pool.shape[1:])
            found = by_page.index_select(0, pages).flatten(0, 1)[own]
            return from_kv_dtype(found.view(pool.dtype), self.dtype, scale)

        keys, values = map(gather, self.pools, self.scales)
        return keys, values


def _attend_row(q: Tensor, kv: _RowKv, kv_len: int, *, scale: float) -> Tensor:
    """q [query_len, heads, head_dim] of the row's last positions -> like q. Tiles are merged in
    float32."""
    num_before = kv_len - len(q)
    out, log_total = _fused(q, *kv.read(num_before, kv_len), scale=scale, is_causal=True)
    for start in range(0, num_before, TILE):
        tile = kv.read(start, min(start + TILE, num_before))
        part, log_part = _fused(q, *tile, scale=scale, is_causal=False)
        share = torch.sigmoid(log_part - log_total)[..., None]
        out = torch.lerp(out.float(), part.float(), share)
        log_total = torch.logaddexp(log_total, log_part)
    return out


def _fused(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim] -> like q, and the
    log-sum-exp of the scores, float32 [queries, heads]."""
    # WHY: scaled_dot_product_attention calls this operator, but does not return the log-sum-exp.
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    by_head = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    out, log_total = attend(*by_head, is_causal=is_causal, scale=scale)
    return out[0].transpose(0, 1), log_total[0].t()


class AttendRows(Protocol):
    """A kernel with the contract of `paged_attention`."""

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring,
        /, *, out: Tensor,
    ) -> None: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChunkedPrefill:
    """A kernel for rows with many queries. It is used from `min_queries` queries and `min_keys`
    keys on, where it is faster than `paged_attention`."""

    attend: AttendRows
    min_queries: int
    min_keys: int
    has_windows_and_caps: bool  # supports windows and soft caps


def choose_chunked_prefill(pools: KvPools, dtype: torch.dtype, num_workers: int) -> ChunkedPrefill:
    """Returns the fastest prefill kernel of this processor, and of the dtypes of queries and KV.

    PERF: without matrix instructions, torch's fused kernel converts bfloat16 to float32 before it
    multiplies; `chunk_attention` uses the processor's bfloat16 dot products. CPU time of one thread
    of an AMD EPYC (AVX-512 bf16), heads of Qwen3-0.6B, as `paged_attention` / `sdpa_tiles` /
    `chunk_attention`: 64 queries behind 4,000 keys 32 / 27 / 8 ms, 2,048 behind 6,144 1,918 / 1,295
    / 395; 64 without a prefix 0.8 / 0.5 / 0.2.
    """
    read_dtype = chunk_kv_dtype(dtype, pools.dtype, read_isa())
    if read_dtype is None or any(kv.keys.shape[2] % OUTPUTS for kv in pools.layers.values()):
        return SDPA_TILES
    if read_dtype != pools.dtype:
        compile_chunk_attention(dtype, num_workers)
        attend = partial(widened_chunks, num_workers=num_workers)
        return ChunkedPrefill(attend, min_queries=16, min_keys=16, has_windows_and_caps=True)
    return compiled_chunks(dtype, num_workers, pools.dtype)


def compiled_chunks(
    dtype: torch.dtype, num_workers: int, kv_dtype: torch.dtype | None = None
) -> ChunkedPrefill:
    compile_chunk_attention(dtype, num_workers, kv_dtype)
    attend = partial(chunk_attention, num_workers=num_workers)
    return ChunkedPrefill(attend, min_queries=4, min_keys=4, has_windows_and_caps=True)


SDPA_TILES = ChunkedPrefill(sdpa_tiles, min_queries=64, min_keys=256, has_windows_and_caps=False)
