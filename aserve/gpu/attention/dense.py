"""Attention of many queries per row over paged KV through torch's fused kernel, on the CPU.

It knows no window and no soft cap. WHY: it gathers copies of keys and values, which takes several
times as long as reading them where they are; but hundreds of queries share each copy, and then it
is a small part of their products. The copies of one tile exist at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve_kernels.cpu.host_rows import HostRows
from aserve_kernels.paged_rows import Scoring

TILE = 2048  # keys


def dense_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring, *, out: Tensor
) -> None:
    """As `paged_attention`, of what is scored without a window that hides anything or a cap."""
    own = rows.own
    for row, kv_len, start, span in zip(own.rows, own.lens, own.starts, own.spans, strict=True):
        kv = _RowKv(keys, values, torch.from_numpy(rows.page_table[row]), rows.page_size)
        part = slice(int(start), int(start + span))
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
