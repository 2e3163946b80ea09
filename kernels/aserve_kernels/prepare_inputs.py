"""A step's packed words as the inputs of its forward: placeholders become ids, bounds become
lengths, tokens get their positions and slots, and the ids go beside the KV. One launch for each
layer group.

It knows no request. Words are int32, what comes out is int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Words:
    """Of one step, int32: rows, kv_lens, spans, is_bound [rows]; owners, offsets, input_ids
    [tokens]. The tokens of a row are side by side, in the order of the rows, at least one of
    each."""

    rows: Tensor
    kv_lens: Tensor  # before the step: exact, or a bound where `is_bound` is not 0
    query_lens: Tensor
    is_bound: Tensor
    token_to_row: Tensor  # each token's place among the rows
    offsets: Tensor  # and in its row's span
    input_ids: Tensor  # -row stands for that row's last token


@dataclass(frozen=True, slots=True)
class Tables:
    """By row, [max_rows + 1, ...]: `last_tokens` and `seq_lens` int64 (None: no length is a bound),
    `page_tables` int64 [.., pages], one per layer group. `token_pool` int32 [slots of group 0]."""

    last_tokens: Tensor
    seq_lens: Tensor | None
    page_tables: tuple[Tensor, ...]
    token_pool: Tensor
    page_size: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """int64: kv_lens and lens, before and after the step, [rows]; query_starts [rows + 1]; the
    rest [tokens], `slots` one per layer group."""

    kv_lens: Tensor
    lens: Tensor
    cu_query_lens: Tensor
    token_rows: Tensor
    input_ids: Tensor
    positions: Tensor
    slots: tuple[Tensor, ...]


def prepare_inputs(words: Words, tables: Tables) -> Prepared:
    """Writes the token pool."""
    num_rows, num_tokens = len(words.rows), len(words.token_to_row)
    groups = len(tables.page_tables)
    sizes = [num_rows, num_rows, num_rows + 1, *[num_tokens] * (3 + groups)]
    # Each begins at a multiple of 16 bytes: kernels that read it are compiled for that.
    rooms = [size + size % 2 for size in sizes]
    parts = torch.empty(sum(rooms), dtype=torch.int64, device=words.rows.device).split(rooms)
    made = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    kv_lens, lens, cu_query_lens, token_rows, input_ids, positions, *slots = made
    seq_lens = tables.last_tokens if tables.seq_lens is None else tables.seq_lens
    grid = (triton.cdiv(max(num_tokens, 1), BLOCK),)
    for group, page_table in enumerate(tables.page_tables):
        _prepare[grid](
            words.rows, words.kv_lens, words.query_lens, words.is_bound,
            words.token_to_row, words.offsets, words.input_ids,
            tables.last_tokens, seq_lens, page_table,
            tables.token_pool, *made[:6], slots[group], num_rows, num_tokens, page_table.stride(0),
            tables.page_size, tables.seq_lens is not None, group == 0, BLOCK,
        )  # fmt: skip
    return Prepared(kv_lens, lens, cu_query_lens, token_rows, input_ids, positions, tuple(slots))


def prepare_inputs_ref(words: Words, tables: Tables) -> Prepared:
    rows, query_lens, token_to_row = (
        words.rows.long(),
        words.query_lens.long(),
        words.token_to_row.long(),
    )
    kv_lens, given = words.kv_lens.long(), words.input_ids.long()
    if tables.seq_lens is not None:
        kv_lens = torch.where(words.is_bound > 0, tables.seq_lens[rows], kv_lens)
    input_ids = torch.where(given < 0, tables.last_tokens[(-given).clamp(min=0)], given)
    token_rows = rows[token_to_row]
    positions = kv_lens[token_to_row] + words.offsets
    columns, within = positions // tables.page_size, positions % tables.page_size
    slots = tuple(
        page_table[token_rows, columns] * tables.page_size + within
        for page_table in tables.page_tables
    )
    tables.token_pool[slots[0]] = input_ids.int()
    cu_query_lens = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0))
    return Prepared(
        kv_lens, kv_lens + query_lens, cu_query_lens, token_rows, input_ids, positions, slots
    )


# A kernel of its own for one row or one token would be compiled while it is waited for.
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
    out_query_starts: tl.tensor,
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
    """A row's values are written by its first token. Only the first group's launch writes what is
    the same for all of them."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = tokens < num_tokens
    owner = tl.load(token_to_row + tokens, mask=is_in, other=0)
    offset = tl.load(offsets + tokens, mask=is_in, other=0)
    row = tl.load(rows + owner, mask=is_in, other=0).to(tl.int64)
    kv_len = tl.load(kv_lens + owner, mask=is_in, other=0).to(tl.int64)
    if HAS_BOUNDS:
        published = tl.load(seq_lens + row, mask=is_in, other=0)
        bound = tl.load(is_bound + owner, mask=is_in, other=0)
        kv_len = tl.where(bound > 0, published, kv_len)
    position = kv_len + offset
    page = tl.load(page_table + row * page_stride + position // page_size, mask=is_in, other=0)
    slot = page * page_size + position % page_size
    tl.store(out_slots + tokens, slot, mask=is_in)
    if IS_FIRST:
        given = tl.load(input_ids + tokens, mask=is_in, other=0).to(tl.int64)
        last = tl.load(last_tokens + tl.maximum(-given, 0), mask=is_in & (given < 0), other=0)
        token = tl.where(given < 0, last, given)
        tl.store(token_pool + slot, token.to(tl.int32), mask=is_in)
        tl.store(out_token_rows + tokens, row, mask=is_in)
        tl.store(out_input_ids + tokens, token, mask=is_in)
        tl.store(out_positions + tokens, position, mask=is_in)
        is_start = is_in & (offset == 0)
        query_len = tl.load(query_lens + owner, mask=is_start, other=0)
        tl.store(out_kv_lens + owner, kv_len, mask=is_start)
        tl.store(out_lens + owner, kv_len + query_len, mask=is_start)
        tl.store(out_query_starts + owner, tokens.to(tl.int64), mask=is_start)
        if tl.program_id(0) == 0:
            tl.store(out_query_starts + num_rows, num_tokens)
