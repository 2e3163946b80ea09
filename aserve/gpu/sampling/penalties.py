"""Presence, frequency and repetition penalties, counted from the token ids in the token pool.

With seen(t) = whether token t occurs in prompt or output, and out(t) = its count in the output:

    z = z / repetition  if z > 0, else  z * repetition           where seen(t)   (CTRL, 2019)
    z = z - frequency * out(t) - presence * [out(t) > 0]                         (OpenAI's API)

Counts are made anew for each sample, so there is no counter state that could lag behind an
overlapped step or need a reset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.sampling.params import LogitsRows, RowColumns, RowTables


def penalise(
    logits: Tensor,
    indices: Tensor,
    rows: LogitsRows,
    tables: RowTables,
    pools: KvPools,
    max_len: int,
) -> None:
    """Changes the logits rows `indices`, int64 [m], of logits [n, vocab] in place. `max_len` bounds
    the length of every row's history."""
    own = rows.rows.index_select(0, indices)
    history = pools.token_ids(own, max_len=max_len)
    if rows.paths is not None:
        history = rows.paths.overlay(history, indices)
    penalised = _penalised(
        logits.index_select(0, indices),
        history,
        rows.lens.index_select(0, indices),
        tables.at(own, logits.dtype),
    )
    logits.index_copy_(0, indices, penalised)


def _penalised(logits: Tensor, history: Tensor, lens: Tensor, params: RowColumns) -> Tensor:
    """logits [n, vocab], history int64 [n, len], of which the first `lens` int64 [n] tokens are
    valid -> new logits [n, vocab]."""
    positions = torch.arange(history.shape[1], device=history.device)
    is_real = positions < lens[:, None]
    is_output = is_real & (positions >= params.ints("prompt_len")[:, None])
    counts = torch.zeros((2, *logits.shape), dtype=logits.dtype, device=logits.device)
    seen = counts[0].scatter_add_(1, history, is_real.to(logits.dtype))
    outputs = counts[1].scatter_add_(1, history, is_output.to(logits.dtype))
    repetition = params.floats("repetition_penalty")[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(seen > 0, repeated, logits)
    penalised = penalised - outputs * params.floats("frequency_penalty")[:, None]
    return penalised - (outputs > 0) * params.floats("presence_penalty")[:, None]
