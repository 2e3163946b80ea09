"""The scores of an indexer over paged index keys, as sparse attention (DSA) needs them.

    out[t, s] = sum_h weights[t, h] relu(q[t, h] . key_s)    for the keys s of token t's row

Page tables and lengths are read on the device, and the grid follows from the shapes alone, so the
scores may be captured in a graph. A program computes BLOCK_N keys of one token; the programs behind
the token's last key do nothing, so a bound far above the length costs little here.
The reference in plain torch is `score_keys` of aserve/gpu/attention/slots.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.dot import dot_add
from aserve_kernels.paged_rows import PagedRows
from aserve_kernels.paged_tiles import padded

BLOCK_N = 64  # NOTE: not measured


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, paged: PagedRows) -> Tensor:
    """q [tokens, heads, dim] and weights [tokens, heads] of one dtype, with contiguous rows; keys
    [slots, dim] of that dtype, contiguous: float32, bfloat16 or float16. Each row of `paged` is one
    token -> float32 [tokens, paged.max_len]. What is behind a token's length is undefined."""
    num_tokens, num_heads, dim = q.shape
    out = q.new_empty((num_tokens, paged.max_len), dtype=torch.float32)
    if not out.numel():
        return out
    is_16_bit = q.element_size() == 2
    _score[(triton.cdiv(paged.max_len, BLOCK_N), num_tokens)](
        q, weights, keys, out, paged.page_table, paged.rows, paged.lens,
        paged.page_table.stride(0), q.stride(0), q.stride(1), weights.stride(0), out.stride(0),
        PAGE_SIZE=paged.page_size,
        NUM_HEADS=num_heads,
        DIM=dim,
        BLOCK_H=padded(num_heads),
        BLOCK_D=padded(dim),
        BLOCK_N=BLOCK_N,
        num_warps=4 if is_16_bit else 8,
    )  # fmt: skip
    return out


# NOTE: unspecialised, since the bound of the lengths may be odd, even or a multiple of 16.
@triton.jit(do_not_specialize=["out_stride"])
def _score(
    q: tl.tensor, weights: tl.tensor, keys: tl.tensor, out: tl.tensor,
    page_table: tl.tensor, rows: tl.tensor, lens: tl.tensor,
    table_stride: int, q_token_stride: int, q_head_stride: int, weights_stride: int,
    out_stride: int,
    PAGE_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Scores BLOCK_N keys of one token."""
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    kv_len = tl.load(lens + token).to(tl.int32)
    if first >= kv_len:
        return
    positions = first + tl.arange(0, BLOCK_N)
    is_key = positions < kv_len
    pages = page_table + tl.load(rows + token).to(tl.int64) * table_stride
    page = tl.load(pages + positions // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
    slots = page * PAGE_SIZE + positions % PAGE_SIZE
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_head, is_dim = heads < NUM_HEADS, dims < DIM
    queries = tl.load(
        q + token * q_token_stride + heads[:, None] * q_head_stride + dims[None, :],
        mask=is_head[:, None] & is_dim[None, :],
        other=0.0,
    )
    k = tl.load(
        keys + slots[:, None] * DIM + dims[None, :],
        mask=is_key[:, None] & is_dim[None, :],
        other=0.0,
    )
    products = dot_add(tl.zeros((BLOCK_H, BLOCK_N), tl.float32), queries, tl.trans(k))
    factors = tl.load(weights + token * weights_stride + heads, mask=is_head, other=0.0)
    # A maximum would turn NaN, which an unsound model gives, into 0.
    products = tl.where(products < 0, 0.0, products) * factors.to(tl.float32)[:, None]
    tl.store(out + token * out_stride + positions, tl.sum(products, 0), mask=is_key)
