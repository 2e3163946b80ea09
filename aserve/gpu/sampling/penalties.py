"""Presence, frequency and repetition penalties from the tokens that lie beside the KV.

Counts are made anew for each sample, so there is no state to lag, reset or repeat. It knows no
step: the history is given.
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
    """logits [n, vocab], in place at `indices` int64 [m]; no row's history is longer than
    `max_len`.
    """
    own = rows.rows.index_select(0, indices)
    penalised = _penalised(
        logits.index_select(0, indices),
        pools.token_ids(own, max_len=max_len),
        rows.lens.index_select(0, indices),
        tables.at(own, logits.dtype),
    )
    logits.index_copy_(0, indices, penalised)


def _penalised(logits: Tensor, history: Tensor, lens: Tensor, params: RowColumns) -> Tensor:
    """logits [n, vocab], history int64 [n, len] of which `lens` int64 [n] are real -> new logits.

    First repetition over all tokens, which scales towards less likely; then, over outputs only,
    frequency per occurrence and presence once.
    """
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
