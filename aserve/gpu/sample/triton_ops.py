"""Sampling by Triton kernels: the same operators whatever the logits are. For GPUs.

It knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.sample.draw import Drawn
from aserve.gpu.sample.logits_rows import LogitsRows
from aserve.gpu.sample.ops import SHAPED_OPS, SampleOps
from aserve.gpu.sample.plan import SamplePlan
from aserve.gpu.sample.row_tables import RowTables
from aserve_kernels import penalties
from aserve_kernels.bitmask import apply_bitmask
from aserve_kernels.sample import sample


def triton_sample_ops(dtype: torch.dtype) -> SampleOps:
    """Kernels for logits of up to 32 bits, torch for wider ones."""
    if dtype == torch.float64:
        return SHAPED_OPS
    return SampleOps(_draw, _penalise, apply_bitmask, filters_by_shape=True, reads_halves=True)


def _draw(logits: Tensor, rows: LogitsRows, tables: RowTables, plan: SamplePlan) -> Drawn:
    tokens, is_sound = sample(
        logits,
        rows.rows,
        rows.lens,
        tables.int_table,
        tables.float_table,
        has_noise=plan.needs_noise,
        has_limits=plan.needs_filter,
    )
    return Drawn(tokens, is_sound)


def _penalise(
    logits: Tensor,
    places: Tensor,
    rows: LogitsRows,
    tables: RowTables,
    pools: KvPools,
    max_len: int,
) -> None:
    of_rows = (tables.int_table, tables.float_table)
    of_tokens = (pools.page_tables[0], pools.token_pool, pools.page_size)
    penalties.penalise(logits, places, rows.rows, rows.lens, of_rows, of_tokens, max_len)
