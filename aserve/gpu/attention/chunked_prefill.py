"""Attention of many queries per row over paged KV through torch's fused kernel, on the CPU.

It knows no window and no soft cap. WHY: it gathers copies of keys and values, which takes several
times as long as reading them where they are; but hundreds of queries share each copy, and then it
is a small part of their products. The copies of one tile exist at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.device.cpu.weights import AVX512_BF16, read_isa
from aserve.gpu.kv.pools import KvPools
from aserve_kernels.cpu.chunk_attention import chunk_attention, compile_chunk_attention
from aserve_kernels.cpu.gemm import OUTPUTS
from aserve_kernels.cpu.host_rows import HostRows
from aserve_kernels.paged_rows import Scoring

TILE = 2048  # keys


def sdpa_tiles(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *, out: Tensor
) -> None:
    """As `paged_attention`, of what is scored without a window that hides anything or a cap."""
    own = rows.queries
    for row, kv_len, start, query_len in zip(
        own.rows, own.lens, own.starts, own.query_lens, strict=True
    ):
        kv = _RowKv(keys, values, torch.from_numpy(rows.page_table[row]), rows.page_size)
        part = slice(int(start), int(start + query_len))
        out[part] = _attend_row(q[part], kv, int(kv_len), scale=scoring.scale)


@dataclass(frozen=True, slots=True)
class _RowKv:
    keys: Tensor
    values: Tensor
    pages: Tensor
    page_size: int

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Of positions start..stop: copies [positions, kv_heads, head_dim]."""
        column = start // self.page_size
        pages = self.pages[column : -(-stop // self.page_size)]
        own = slice(start - column * self.page_size, stop - column * self.page_size)

        def gather(pool: Tensor) -> Tensor:
            by_page = pool.view(-1, self.page_size, *pool.shape[1:])
            return by_page.index_select(0, pages).flatten(0, 1)[own]

        return gather(self.keys), gather(self.values)


def _attend_row(q: Tensor, kv: _RowKv, kv_len: int, *, scale: float) -> Tensor:
    """q [span, heads, head_dim] of the row's last positions -> like q. Parts of the softmax are
    joined by their logarithms, in float32."""
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
    """q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim] -> like q, and float32
    [queries, heads], the logarithm of the sum of exp(score)."""
    # WHY: scaled_dot_product_attention calls this, but keeps the logarithm to itself.
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    by_head = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    out, log_total = attend(*by_head, is_causal=is_causal, scale=scale)
    return out[0].transpose(0, 1), log_total[0].t()


class AttendRows(Protocol):
    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring,
        /, *, out: Tensor,
    ) -> None:  # fmt: skip
        """As `paged_attention`."""


@dataclass(frozen=True, slots=True)
class ChunkedPrefill:
    attend: AttendRows
    least: int  # queries of a row from which it takes less time than `paged_attention`,
    least_keys: int  # with so many keys
    hides: bool  # knows soft caps, and windows that hide something


def choose_chunked_prefill(pools: KvPools, num_workers: int) -> ChunkedPrefill:
    """PERF: torch's fused kernel multiplies bfloat16 in float32, unless the processor has matrix
    instructions; a kernel of its own takes the products of pairs of one that has only those. CPU
    time of one thread of an AMD EPYC (AVX-512 bf16), heads of Qwen3-0.6B, as `paged_attention` /
    fused / in pairs: 64 queries behind 4,000 keys 32 / 27 / 8 ms, 2,048 behind 6,144 1,918 / 1,295
    / 395; in float32 46 / 36 and 2,534 / 1,394; 64 without a prefix 0.8 / 0.5 / 0.2.
    """
    is_paired = pools.dtype == torch.bfloat16 and read_isa().bf16_products == AVX512_BF16
    if is_paired and all(kv.keys.shape[2] % OUTPUTS == 0 for kv in pools.layers.values()):
        return in_pairs(num_workers)
    return FUSED


def in_pairs(num_workers: int) -> ChunkedPrefill:
    compile_chunk_attention(num_workers)
    attend = partial(chunk_attention, num_workers=num_workers)
    return ChunkedPrefill(attend, least=4, least_keys=4, hides=True)


FUSED = ChunkedPrefill(sdpa_tiles, least=64, least_keys=256, hides=False)
