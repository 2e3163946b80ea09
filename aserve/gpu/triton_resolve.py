"""A step's words resolved by one Triton kernel. For GPUs.

It decides nothing. What it writes is the token pool.
"""

from __future__ import annotations

import dataclasses

import torch

from aserve.gpu.device_batch import DeviceStep, Placed
from aserve.gpu.future_map import LAST_TOKEN, SEQ_LEN
from aserve.gpu.resolve import DeviceState, Resolve, resolve, resolved_batch
from aserve.gpu.sections import DeviceSections
from aserve.gpu.step_plan import StepPlan
from aserve_kernels.prepare_inputs import Tables, Words, prepare_inputs


def triton_resolver(dtype: torch.dtype) -> Resolve:
    """A model in float64 is there to be exact, and runs without any kernel of ours."""
    return resolve if dtype == torch.float64 else triton_resolve


def triton_resolve(plan: StepPlan, sections: DeviceSections, state: DeviceState) -> DeviceStep:
    """As `resolve`, which does it where tokens come from drafts."""
    if plan.num_drafts.any():
        return resolve(plan, sections, state)
    ints, relay, pools = sections.narrow_ints, state.relay, state.pools
    words = Words(
        rows=ints("rows"),
        kv_lens=ints("kv_lens"),
        spans=ints("spans"),
        is_bound=ints("is_bound"),
        owners=ints("owners"),
        offsets=ints("offsets"),
        input_ids=ints("input_ids"),
    )
    tables = Tables(
        last_tokens=relay.table(LAST_TOKEN),
        seq_lens=relay.table(SEQ_LEN) if SEQ_LEN in relay else None,
        page_tables=pools.page_tables,
        token_pool=pools.token_pool,
        page_size=pools.page_size,
    )
    made = prepare_inputs(words, tables)
    placed = Placed(made.token_rows, made.positions, made.slots, made.lens, made.query_starts)
    batch = resolved_batch(plan, sections, input_ids=made.input_ids, kv_lens=made.kv_lens)
    return DeviceStep(plan, dataclasses.replace(batch, placed=placed), sections)
