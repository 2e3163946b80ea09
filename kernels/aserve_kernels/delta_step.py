"""The recurrences of Gated DeltaNet and Mamba-2 for steps in which each row has few tokens: see
delta_rule.py.

Two kernels: one computes conv and keeps each row's last inputs, and one applies the rule, which
reads each matrix once, and writes it once for each token. They read rows and lengths on the
device, so that a graph may capture them. Steps with more tokens than a row keeps states for run in
torch, in chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.delta_rule import (
    LENGTH_EPS,
    DeltaRows,
    DeltaStates,
    DeltaTokens,
    advance_rows_ref,
)

BLOCK_C = 1024  # channels of a program  NOTE: not measured
BLOCK_V = 32  # columns of a matrix that a program has  NOTE: not measured


def advance_rows(tokens: DeltaTokens, rows: DeltaRows, states: DeltaStates, /) -> Tensor:
    """Does what `advance_rows_ref` does, for float32, bfloat16 and float16."""
    num_places, num_heads, key_dim, value_dim = states.matrices.shape[1:]
    if rows.query_lens_cpu.max(initial=0) > num_places:
        return advance_rows_ref(tokens, rows, states)
    num_tokens, num_channels = tokens.channels.shape
    num_keys = (num_channels - num_heads * value_dim) // (2 * key_dim)
    mixed = tokens.channels.new_empty((num_tokens, num_channels), dtype=torch.float32)
    space = tokens.space
    _convolve[(num_tokens, triton.cdiv(num_channels, BLOCK_C))](
        tokens.channels, tokens.conv, None if space is None else space.bias, states.inputs, mixed,
        rows.rows, rows.kv_lens, rows.cu_query_lens, rows.token_to_row,
        num_channels, tokens.channels.stride(0), states.inputs.shape[1],
        WIDTH=tokens.conv.shape[1],
        IS_SPACE=space is not None,
        BLOCK=BLOCK_C,
    )  # fmt: skip
    out = mixed.new_empty((num_tokens, num_heads, value_dim))
    _apply_rule[(len(rows.rows), num_heads, triton.cdiv(value_dim, BLOCK_V))](
        mixed, tokens.log_decay.contiguous(), tokens.rate.contiguous(),
        None if space is None else space.skip, states.matrices, out,
        rows.rows, rows.kv_lens, rows.cu_query_lens, num_places, key_dim**-0.5, LENGTH_EPS,
        NUM_KEYS=num_keys,
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        IS_SPACE=space is not None,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=BLOCK_V,
    )  # fmt: skip
    return out


@triton.jit
def _convolve(
    channels: tl.tensor, conv: tl.tensor, bias: tl.tensor, inputs: tl.tensor, mixed: tl.tensor,
    rows: tl.tensor, kv_lens: tl.tensor, starts: tl.tensor, token_to_row: tl.tensor,
    num_channels: int, token_stride: int, num_places: int,
    WIDTH: tl.constexpr, IS_SPACE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """mixed [tokens, channels] = silu(conv), for BLOCK channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = columns < num_channels
    index = tl.load(token_to_row + token)
    place = token - tl.load(starts + index)  # of the token in the forward of its row
    position = tl.load(kv_lens + index) + place
    own = inputs + tl.load(rows + index).to(tl.int64) * num_places * num_channels + columns
    new = tl.load(channels + token * token_stride + columns, mask=in_bounds, other=0.0)
    weight = tl.load(conv + columns * WIDTH + WIDTH - 1, mask=in_bounds, other=0.0)
    total = new.to(tl.float32) * weight.to(tl.float32)
    if IS_SPACE:
        total += tl.load(bias + columns, mask=in_bounds, other=0.0)
    for back in tl.static_range(1, WIDTH):
        is_new = place >= back
        earlier = tl.load(
            channels + (token - back) * token_stride + columns, mask=in_bounds & is_new, other=0.0
        )
        slot = (position - back + num_places) % num_places
        is_kept = in_bounds & (place < back) & (position >= back)
        kept = tl.load(own + slot * num_channels, mask=is_kept, other=0.0)
        weight = tl.load(conv + columns * WIDTH + WIDTH - 1 - back, mask=in_bounds, other=0.0)
        total += tl.where(is_new, earlier, kept).to(tl.float32) * weight.to(tl.float32)
    tl.store(own + position % num_places * num_channels, new, mask=in_bounds)
    tl.store(mixed + token * num_channels + columns, total * tl.sigmoid(total), mask=in_bounds)


@triton.jit
def _apply_rule(
    mixed: tl.tensor, log_decay: tl.tensor, rate: tl.tensor, skip: tl.tensor,
    matrices: tl.tensor, out: tl.tensor,
    rows: tl.tensor, kv_lens: tl.tensor, starts: tl.tensor,
    num_places: int, scale: float, eps: float,
    NUM_KEYS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, IS_SPACE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:  # fmt: skip
    """Advances BLOCK_V columns of one matrix of one row."""
    index, head = tl.program_id(0), tl.program_id(1)
    keys = tl.arange(0, BLOCK_K)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_column = keys < KEY_DIM, columns < VALUE_DIM
    in_bounds = is_key[:, None] & is_column[None, :]
    first, last = tl.load(starts + index).to(tl.int64), tl.load(starts + index + 1).to(tl.int64)
    begin = tl.load(kv_lens + index).to(tl.int64)
    of_row = matrices + tl.load(rows + index).to(tl.int64) * num_places * (
        NUM_HEADS * KEY_DIM * VALUE_DIM
    )
    of_head = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + columns[None, :]
    of_key = head // (NUM_HEADS // NUM_KEYS) * KEY_DIM + keys
    if IS_SPACE:  # values, keys, queries
        first_v, first_k = 0, NUM_HEADS * VALUE_DIM
        first_q = first_k + NUM_KEYS * KEY_DIM
    else:  # queries, keys, values
        first_q, first_k = 0, NUM_KEYS * KEY_DIM
        first_v = 2 * NUM_KEYS * KEY_DIM
    read = of_row + begin % num_places * (NUM_HEADS * KEY_DIM * VALUE_DIM) + of_head
    state = tl.load(read, mask=in_bounds & (begin > 0), other=0.0)
    for token in range(first, last):
        own = mixed + token * (2 * NUM_KEYS * KEY_DIM + NUM_HEADS * VALUE_DIM)
        q = tl.load(own + first_q + of_key, mask=is_key, other=0.0)
        k = tl.load(own + first_k + of_key, mask=is_key, other=0.0)
        if not IS_SPACE:
            q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + eps))
            k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + eps))
        values = own + first_v + head * VALUE_DIM
        v = tl.load(values + columns, mask=is_column, other=0.0)
        decay = tl.exp(tl.load(log_decay + token * NUM_HEADS + head).to(tl.float32))
        beta = tl.load(rate + token * NUM_HEADS + head).to(tl.float32)
        state = state * decay
        if not IS_SPACE:
            v -= tl.sum(k[:, None] * state, 0)
        change = v * beta
        state += k[:, None] * change[None, :]
        slot = (begin + token - first + 1) % num_places
        tl.store(of_row + slot * (NUM_HEADS * KEY_DIM * VALUE_DIM) + of_head, state, mask=in_bounds)
        y = tl.sum(q[:, None] * state, 0)
        if IS_SPACE:
            y += tl.load(skip + head) * v
        tl.store(out + (token * NUM_HEADS + head) * VALUE_DIM + columns, y, mask=is_column)
