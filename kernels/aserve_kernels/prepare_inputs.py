"""Computes the inputs of a step's forward on the device, in one kernel launch per layer group.

    kv_len    = seq_lens[row] if is_bound[i] else kv_lens[i]          for row i of the step
    position  = kv_len + offset                                       for each token
    slot      = page_table[row, position // page_size] * page_size + position % page_size
    input_id  = last_tokens[-id] if id < 0 else id,   token_pool[slot] = input_id

The host packs a step before the previous one has finished. So a token id may be a placeholder for
the last token of a row, and a KV length may be an upper bound; the relay's tables have the actual
values by the time the kernel runs. The packed inputs are int32, the results int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """One step as the host packed it, int32. The tokens of a row are adjacent, in the order of the
    rows, and each row has at least one."""

    rows: Tensor  # [rows], each row's row of the tables
    kv_lens: Tensor  # [rows], KV lengths before the step: exact, or a bound if `is_bound` is not 0
    query_lens: Tensor  # [rows]
    is_bound: Tensor  # [rows]
    token_to_row: Tensor  # [tokens], indices into `rows`
    offsets: Tensor  # [tokens], the token's index among its row's queries
    input_ids: Tensor  # [tokens]; -r stands for the last token of the tables' row r


@dataclass(frozen=True, slots=True)
class Tables:
    """The engine's tables on the device."""

    last_tokens: Tensor  # [max_rows + 1] int64
    seq_lens: Tensor | None  # [max_rows + 1] int64; None if every KV length is exact
    page_tables: tuple[Tensor, ...]  # [max_rows + 1, pages] int64, one per layer group
    token_pool: Tensor  # [slots of group 0] int32
    page_size: int


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The inputs of the forward, int64."""

    kv_lens: Tensor  # [rows], KV lengths before the step
    lens: Tensor  # [rows], KV lengths after the step
    cu_query_lens: Tensor  # [rows + 1]
    token_rows: Tensor  # [tokens], the tables' row of each token
    input_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: tuple[Tensor, ...]  # [tokens], one per layer group


def prepare_inputs(packed: PackedInputs, tables: Tables) -> ForwardInputs:
    """Returns the forward's inputs, and writes the token pool."""
    num_rows, num_tokens = len(packed.rows), len(packed.token_to_row)
    groups = len(tables.page_tables)
    sizes = [num_rows, num_rows, num_rows + 1, *[num_tokens] * (3 + groups)]
    # Every result begins at a multiple of 16 bytes: kernels that read it are compiled for that.
    padded_sizes = [size + size % 2 for size in sizes]
    parts = torch.empty(sum(padded_sizes), dtype=torch.int64, device=packed.rows.device).split(
        padded_sizes
    )
    results = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    kv_lens, lens, cu_query_lens, token_rows, input_ids, positions, *slots = results
    seq_lens = tables.last_tokens if tables.seq_lens is None else tables.seq_lens
    grid = (triton.cdiv(max(num_tokens, 1), BLOCK),)
    for group, page_table in enumerate(tables.page_tables):
        _prepare[grid](
            packed.rows, packed.kv_lens, packed.query_lens, packed.is_bound, packed.token_to_row,
            packed.offsets, packed.input_ids, tables.last_tokens, seq_lens, page_table,
            tables.token_pool, *results[:6], slots[group], num_rows, num_tokens,
            page_table.stride(0), tables.page_size, tables.seq_lens is not None, group == 0, BLOCK,
        )  # fmt: skip
    return ForwardInputs(
        kv_lens, lens, cu_query_lens, token_rows, input_ids, positions, tuple(slots)
    )


def prepare_inputs_ref(packed: PackedInputs, tables: Tables) -> ForwardInputs:
    rows, query_lens = packed.rows.long(), packed.query_lens.long()
    token_to_row = packed.token_to_row.long()
    kv_lens, ids = packed.kv_lens.long(), packed.input_ids.long()
    if tables.seq_lens is not None:
        kv_lens = torch.where(packed.is_bound > 0, tables.seq_lens[rows], kv_lens)
    input_ids = torch.where(ids < 0, tables.last_tokens[(-ids).clamp(min=0)], ids)
    token_rows = rows[token_to_row]
    positions = kv_lens[token_to_row] + packed.offsets
    columns, within = positions // tables.page_size, positions % tables.page_size
    slots = tuple(
        page_table[token_rows, columns] * tables.page_size + within
        for page_table in tables.page_tables
    )
    tables.token_pool[slots[0]] = input_ids.int()
    cu_query_lens = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0))
    return ForwardInputs(
        kv_lens, kv_lens + query_lens, cu_query_lens, token_rows, input_ids, positions, slots
    )


# NOTE: unspecialised; a kernel for one row or one token would be compiled while requests wait.
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _prepare(
    rows: tl.tensor,
    kv_lens: tl.tensor,
    query_lens: tl.tensor,
    is_bound: tl.tensor,
    token_to_row: tl.tensor,
    offsets: tl.tensor,
    input_ids: tl.tensor,
    last_tokens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    token_pool: tl.tensor,
    out_kv_lens: tl.tensor,
    out_lens: tl.tensor,
    out_cu_query_lens: tl.tensor,
    out_token_rows: tl.tensor,
    out_input_ids: tl.tensor,
    out_positions: tl.tensor,
    out_slots: tl.tensor,
    num_rows: int,
    num_tokens: int,
    page_stride: int,
    page_size: int,
    HAS_BOUNDS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A row's values are written by its first token. Only the first layer group's launch writes the
    values that all groups share."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = tokens < num_tokens
    step_row = tl.load(token_to_row + tokens, mask=in_bounds, other=0)
    offset = tl.load(offsets + tokens, mask=in_bounds, other=0)
    row = tl.load(rows + step_row, mask=in_bounds, other=0).to(tl.int64)
    kv_len = tl.load(kv_lens + step_row, mask=in_bounds, other=0).to(tl.int64)
    if HAS_BOUNDS:
        published = tl.load(seq_lens + row, mask=in_bounds, other=0)
        bound = tl.load(is_bound + step_row, mask=in_bounds, other=0)
        kv_len = tl.where(bound > 0, published, kv_len)
    position = kv_len + offset
    page = tl.load(page_table + row * page_stride + position // page_size, mask=in_bounds, other=0)
    slot = page * page_size + position % page_size
    tl.store(out_slots + tokens, slot, mask=in_bounds)
    if IS_FIRST:
        ids = tl.load(input_ids + tokens, mask=in_bounds, other=0).to(tl.int64)
        last = tl.load(last_tokens + tl.maximum(-ids, 0), mask=in_bounds & (ids < 0), other=0)
        token = tl.where(ids < 0, last, ids)
        tl.store(token_pool + slot, token.to(tl.int32), mask=in_bounds)
        tl.store(out_token_rows + tokens, row, mask=in_bounds)
        tl.store(out_input_ids + tokens, token, mask=in_bounds)
        tl.store(out_positions + tokens, position, mask=in_bounds)
        is_start = in_bounds & (offset == 0)
        query_len = tl.load(query_lens + step_row, mask=is_start, other=0)
        tl.store(out_kv_lens + step_row, kv_len, mask=is_start)
        tl.store(out_lens + step_row, kv_len + query_len, mask=is_start)
        tl.store(out_cu_query_lens + step_row, tokens.to(tl.int64), mask=is_start)
        if tl.program_id(0) == 0:
            tl.store(out_cu_query_lens + num_rows, num_tokens)
