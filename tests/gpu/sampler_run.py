"""The sampler by itself: rows with a history in the token pool, logits in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.sampling.ops import PLAIN_OPS, SampleOps
from aserve.gpu.sampling.params import LogitsRows, init_columns
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.sampling.sampler import Sampled, Sampler, Staged
from aserve.gpu.transfer.staging import HostArrays
from aserve.messages.step import RowInit
from tests.gpu.device_tables import MAX_ROWS, PAGE_SIZE, make_tables, to_device


@dataclass(frozen=True)
class DrawAt:
    """A draw for a row at a position: the number of tokens before the drawn one."""

    row: int
    position: int


def run_sampler(
    logits: Tensor,
    inits: Sequence[RowInit],
    histories: Sequence[Sequence[int]],
    drawn: Sequence[DrawAt],
    *,
    mask: Tensor | None = None,
    ops: SampleOps = PLAIN_OPS,
) -> Sampled:
    """logits [drawn, vocab], which stay; a row may be drawn for at several positions."""
    num_columns = max(len(history) for history in histories) // PAGE_SIZE + 1
    state = make_tables(num_pages=num_columns * MAX_ROWS + 1)
    for init, history in zip(inits, histories, strict=True):
        pages = torch.arange(num_columns) * MAX_ROWS + init.row  # scattered over the pool
        state.pools.page_tables[0][init.row, :num_columns] = pages
        slots = state.pools.slots(
            0, torch.full((len(history),), init.row), torch.arange(len(history))
        )
        state.pools.token_pool[slots] = torch.tensor(history, dtype=torch.int32)
    ints, floats = map(torch.from_numpy, init_columns(inits, state.tables.shares))
    state.tables.write(torch.tensor([init.row for init in inits]), ints=ints, floats=floats)
    rows = np.array([each.row for each in drawn], np.int32)
    lens = torch.tensor([each.position for each in drawn])
    row_params = RowParams(MAX_ROWS)
    row_params.write(inits)
    plan = row_params.plan(rows, max_len=int(lens.max()), vocab_size=logits.shape[1])
    arrays = HostArrays()
    plan.stage(arrays, "slice0")
    staged = Staged(plan, to_device(arrays), "slice0")
    sampler = Sampler(state.tables, state.pools, ops)
    of_rows = LogitsRows(torch.from_numpy(rows).to(torch.int64), lens, mask)
    return sampler.sample(logits.clone(), of_rows, staged)
