"""Presence, frequency and repetition penalties, from counts that are made anew of the tokens in the
pool, read through the page table.

Counts are integers, so their order doesn't matter: a row's logits are the same in every batch. It
knows no step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.row_columns import FREQUENCY, PRESENCE, PROMPT_LEN, REPETITION

BLOCK = 1024
IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)  # a bit above all counts of outputs


def penalise(
    logits: Tensor,
    indices: Tensor,
    rows: Tensor,
    lens: Tensor,
    tables: tuple[Tensor, Tensor],
    tokens: tuple[Tensor, Tensor, int],
    max_len: int,
) -> None:
    """logits float32 [n, vocab], the tokens of a row side by side, in place at `indices` int64 [m];
    rows, lens int64 [n]: whose history, and how long. `tables` are ints and floats as in
    row_columns.py; `tokens` the page table int64 [max_rows + 1, pages], the token pool int32
    [slots], and the page size. No history is longer than `max_len`.

    First repetition over all tokens, which scales towards less likely; then, over outputs only,
    frequency per occurrence and presence once.
    """
    num, vocab_size = len(indices), logits.shape[1]
    if not num:
        return
    ints, floats = tables
    page_table, pool, page_size = tokens
    counts = torch.zeros((num, vocab_size), dtype=torch.int32, device=logits.device)
    _count[(num, triton.cdiv(max_len, BLOCK))](
        indices, rows, lens, ints, page_table, pool, counts, ints.stride(0), page_table.stride(0),
        page_size, vocab_size, BLOCK,
    )  # fmt: skip
    _apply[(num, triton.cdiv(vocab_size, BLOCK))](
        logits, indices, rows, floats, counts, logits.stride(0), floats.stride(0), vocab_size, BLOCK
    )


def penalise_ref(
    logits: Tensor,
    indices: Tensor,
    rows: Tensor,
    lens: Tensor,
    tables: tuple[Tensor, Tensor],
    tokens: tuple[Tensor, Tensor, int],
    max_len: int,
) -> None:
    ints, floats = tables
    page_table, pool, page_size = tokens
    for place in indices:
        row, length = rows[place], lens[place]
        positions = torch.arange(max_len, device=logits.device)[:length]
        slots = page_table[row, positions // page_size] * page_size + positions % page_size
        history = pool[slots].long()
        outputs = torch.zeros_like(logits[0])
        outputs.index_add_(0, history, (positions >= ints[row, PROMPT_LEN.value]).float())
        own = logits[place]
        repetition, frequency, presence = (
            floats[row, column.value].float() for column in (REPETITION, FREQUENCY, PRESENCE)
        )
        repeated = torch.where(own > 0, own / repetition, own * repetition)
        penalised = own.index_copy(0, history, repeated[history])
        logits[place] = penalised - outputs * frequency - (outputs > 0) * presence


@triton.jit
def _count(
    indices: tl.tensor,
    rows: tl.tensor,
    lens: tl.tensor,
    ints: tl.tensor,
    page_table: tl.tensor,
    pool: tl.tensor,
    counts: tl.tensor,
    int_stride: int,
    page_stride: int,
    page_size: int,
    vocab_size: int,
    BLOCK: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    place = tl.load(indices + number)
    row = tl.load(rows + place)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = positions < tl.load(lens + place)
    pages = tl.load(page_table + row * page_stride + positions // page_size, mask=is_in, other=0)
    tokens = tl.load(pool + pages * page_size + positions % page_size, mask=is_in, other=0)
    own = counts + number * vocab_size + tokens
    is_prompt = positions < tl.load(ints + row * int_stride + PROMPT_LEN)
    tl.atomic_or(own, IN_PROMPT, mask=is_in & is_prompt, sem="relaxed")
    tl.atomic_add(own, 1, mask=is_in & (is_prompt == 0), sem="relaxed")


@triton.jit
def _apply(
    logits: tl.tensor,
    indices: tl.tensor,
    rows: tl.tensor,
    floats: tl.tensor,
    counts: tl.tensor,
    stride: int,
    float_stride: int,
    vocab_size: int,
    BLOCK: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    place = tl.load(indices + number)
    own = floats + tl.load(rows + place) * float_stride
    repetition = tl.load(own + REPETITION).to(tl.float32)
    frequency = tl.load(own + FREQUENCY).to(tl.float32)
    presence = tl.load(own + PRESENCE).to(tl.float32)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < vocab_size
    seen = tl.load(counts + number * vocab_size + columns, mask=is_in, other=0)
    values = tl.load(logits + place * stride + columns, mask=is_in, other=0.0)
    repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values = tl.where(seen > 0, repeated, values)
    outputs = seen & (IN_PROMPT - 1)
    values = values - outputs.to(tl.float32) * frequency
    values = values - tl.where(outputs > 0, presence, 0.0)
    tl.store(logits + place * stride + columns, values, mask=is_in)
