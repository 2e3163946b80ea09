"""Repetition, frequency and presence penalties, applied to logits in place.

    l = l / repetition if l > 0 else l * repetition        for each token of the prompt or output
    l = l - frequency * count(token) - presence            for each token of the output

The repetition penalty is CTRL's (Keskar et al., 2019), the other two are OpenAI's. Each step counts
the tokens of a row anew from the token pool, through the page table, so no counts have to be kept
or repaired. The counts are sums of integers, whose order does not matter: a row's logits are the
same in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS

BLOCK = 1024
PROMPT_LEN: tl.constexpr = tl.constexpr(INT_COLUMNS.index("prompt_len"))
PRESENCE: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("presence_penalty"))
FREQUENCY: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("frequency_penalty"))
REPETITION: tl.constexpr = tl.constexpr(FLOAT_COLUMNS.index("repetition_penalty"))
IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)  # a flag bit, above every count of an output token


def penalise(
    logits: Tensor,
    indices: Tensor,
    rows: Tensor,
    lens: Tensor,
    tables: tuple[Tensor, Tensor],
    tokens: tuple[Tensor, Tensor, int],
    max_len: int,
) -> None:
    """Penalises the logits rows `indices` in place.

    logits float32 [n, vocab] with contiguous rows; indices int64 [m]. Logits row i belongs to row
    rows[i] of the tables, whose first lens[i] tokens are its history; rows and lens are int64 [n],
    and no length exceeds `max_len`. `tables` are the int64 and float64 tables of row_columns.py;
    `tokens` are the page table int64 [max_rows + 1, pages], the token pool int32 [slots] and the
    page size.
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
    for index in indices:
        row, length = rows[index], lens[index]
        positions = torch.arange(max_len, device=logits.device)[:length]
        slots = page_table[row, positions // page_size] * page_size + positions % page_size
        history = pool[slots].long()
        outputs = torch.zeros_like(logits[0])
        outputs.index_add_(0, history, (positions >= ints[row, PROMPT_LEN.value]).float())
        values = logits[index]
        repetition, frequency, presence = (
            floats[row, column.value].float() for column in (REPETITION, FREQUENCY, PRESENCE)
        )
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        penalised = values.index_copy(0, history, repeated[history])
        logits[index] = penalised - outputs * frequency - (outputs > 0) * presence


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
    count_row = tl.program_id(0).to(tl.int64)
    logits_row = tl.load(indices + count_row)
    row = tl.load(rows + logits_row)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = positions < tl.load(lens + logits_row)
    pages = tl.load(
        page_table + row * page_stride + positions // page_size, mask=in_bounds, other=0
    )
    tokens = tl.load(pool + pages * page_size + positions % page_size, mask=in_bounds, other=0)
    addresses = counts + count_row * vocab_size + tokens
    is_prompt = positions < tl.load(ints + row * int_stride + PROMPT_LEN)
    tl.atomic_or(addresses, IN_PROMPT, mask=in_bounds & is_prompt, sem="relaxed")
    tl.atomic_add(addresses, 1, mask=in_bounds & (is_prompt == 0), sem="relaxed")


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
    count_row = tl.program_id(0).to(tl.int64)
    logits_row = tl.load(indices + count_row)
    params = floats + tl.load(rows + logits_row) * float_stride
    repetition = tl.load(params + REPETITION).to(tl.float32)
    frequency = tl.load(params + FREQUENCY).to(tl.float32)
    presence = tl.load(params + PRESENCE).to(tl.float32)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = columns < vocab_size
    seen = tl.load(counts + count_row * vocab_size + columns, mask=in_bounds, other=0)
    values = tl.load(logits + logits_row * stride + columns, mask=in_bounds, other=0.0)
    repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values = tl.where(seen > 0, repeated, values)
    outputs = seen & (IN_PROMPT - 1)
    values = values - outputs.to(tl.float32) * frequency
    values = values - tl.where(outputs > 0, presence, 0.0)
    tl.store(logits + logits_row * stride + columns, values, mask=in_bounds)
