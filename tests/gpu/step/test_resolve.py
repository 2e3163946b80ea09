"""Input ids are the bridge: every kind of step is one array, and one resolver makes it known ids.

Also the head of a step: new tenants, their pages, and the token ids beside the KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from aserve.errors import BugError
from aserve.gpu.device.cuda.ops import triton_resolve
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.future_map import LAST_TOKEN
from aserve.gpu.step.resolve import DRAFTS, DeviceState, Resolve, resolve, resolved_batch
from aserve.messages.base import pack_i32
from aserve.messages.step import PageWrites, ScheduleBatch, VerifyPlan
from tests.gpu.batch_builder import greedy, schedule_batch
from tests.gpu.device_tables import MAX_ROWS, PAGE_SIZE, bring, make_tables

# The relay before each case: row r has sampled 100 + r, published the length 9 + r, and drafted
# 200 + r and 300 + r.
EVERY_ROW = torch.arange(1, MAX_ROWS + 1)


@dataclass(frozen=True)
class Case:
    """Row r has the pages 3 r, 3 r + 1 and 3 r + 2. `ids` and `positions` are what must come."""

    rows: list[int]
    query_lens: list[int]
    input_ids: list[int]
    kv_lens: list[int]
    ids: list[int]
    positions: list[int]
    bounds: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)


CASES = {
    "prefill": Case([2], [5], [7, 0, 9, 8, 7], [0], [7, 0, 9, 8, 7], [0, 1, 2, 3, 4]),
    "chunk": Case([2], [3], [5, 6, 4], [4], [5, 6, 4], [4, 5, 6]),
    "decode": Case([4, 1], [1, 1], [-4, -1], [3, 9], [104, 101], [3, 9]),
    "decode whose token is known": Case([4, 1], [1, 1], [33, -1], [3, 9], [33, 101], [3, 9]),
    "mixed": Case([3, 1], [1, 3], [-3, 8, 8, 9], [6, 2], [103, 8, 8, 9], [6, 2, 3, 4]),
    "decode behind a bound": Case(
        [1, 3], [1, 1], [-1, -3], [40, 5], [101, 103], [10, 5], bounds=[1, 0]
    ),
    "verify": Case(
        [2, 5],
        [3, 1],
        [-2, -2, -2, -5],
        [4, 8],
        [102, 202, 302, 105],
        [4, 5, 6, 8],
        num_drafts=[2, 0],
    ),
    "verify at the end of a known prefill": Case(
        [2], [3], [21, 22, -2], [4], [21, 22, 202], [4, 5, 6], num_drafts=[1]
    ),
    "verify behind a bound": Case(
        [1, 3], [2, 1], [-1, -1, -3], [40, 5], [101, 201, 103], [10, 11, 5], [1, 0], [1, 0]
    ),
    "idle": Case([], [], [], [], [], []),
    "padding": Case([0], [2], [0, 0], [0], [0, 0], [0, 1]),
    "preset ids": Case([3], [3], [150_000, 2, 2**31 - 1], [0], [150_000, 2, 2**31 - 1], [0, 1, 2]),
}


def tables_in_use() -> DeviceState:
    state = make_tables()
    for column in range(3):
        state.pools.page_tables[0][1:, column] = 3 * EVERY_ROW + column
    state.relay.publish(EVERY_ROW, EVERY_ROW + 9)
    drafts = torch.stack((EVERY_ROW + 200, EVERY_ROW + 300), dim=1)
    fields = {LAST_TOKEN: EVERY_ROW + 100, DRAFTS: drafts}
    state.relay.stash(EVERY_ROW, fields, iteration=torch.tensor([4]))
    return state


def batch_of(case: Case) -> ScheduleBatch:
    return schedule_batch(
        case.rows,
        case.query_lens,
        case.input_ids,
        case.kv_lens,
        bounds=bytes(case.bounds or len(case.rows)),
        expects=pack_i32([4 for _ in case.rows]),
        verify=VerifyPlan(pack_i32(case.num_drafts)) if case.num_drafts else None,
    )


@pytest.mark.parametrize("by", [resolve, triton_resolve], ids=["torch", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_step_resolves_to_known_ids_at_their_positions(name: str, by: Resolve) -> None:
    """The ids lie beside the KV of their row as well, and nowhere else but in page 0."""
    case, state = CASES[name], tables_in_use()
    state.pools.token_pool.fill_(-1)
    step = bring(batch_of(case), state, by)
    batch = step.batch
    rows = np.repeat(case.rows, case.query_lens).tolist()
    assert batch.input_ids.tolist() == case.ids
    assert batch.cache_positions.tolist() == case.positions
    assert batch.token_rows.tolist() == rows
    resolved = resolved_batch(
        step.plan, step.arrays, input_ids=batch.input_ids, kv_lens=batch.kv_lens
    )
    expected = ForwardBatch.init_new(resolved, state.pools)
    for field_ in ("token_rows", "cache_positions", "slots", "lens", "cu_query_lens"):
        got, wanted = (getattr(each, field_) for each in (batch, expected))
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    written = {
        3 * row * PAGE_SIZE + position: token
        for row, position, token in zip(rows, case.positions, case.ids, strict=True)
        if row != 0
    }
    pool = enumerate(state.pools.token_pool.tolist())
    found = {slot: token for slot, token in pool if slot >= PAGE_SIZE and token != -1}
    assert found == written


def test_a_batch_whose_parts_disagree_is_refused() -> None:
    case = Case([2], [3], [5, 6], [0], [], [])
    with pytest.raises(BugError, match="is not one batch"):
        bring(batch_of(case), tables_in_use())


# ---------------------------------------------------------------- tenants and pages


def tenant(*, kv_len: int, writes: PageWrites) -> ScheduleBatch:
    """Row 2 begins."""
    init = greedy(2, seed=-3, top_k=4, temperature=0.5, min_p=0.25)
    return schedule_batch([2], [2], [1, 2], [kv_len], page_writes=(writes,), row_inits=(init,))


def test_a_new_tenant_finds_nothing_of_the_former_one() -> None:
    """Page table, stamp and parameters are its own; its neighbours' stay."""
    state = tables_in_use()
    writes = PageWrites(pack_i32([2]), pack_i32([0]), pack_i32([19]))
    bring(tenant(kv_len=0, writes=writes), state)
    table = state.pools.page_tables[0]
    assert table[2].tolist()[:4] == [19, 0, 0, 0]
    assert table[3].tolist()[:3] == [9, 10, 11]
    assert state.relay.written_iter.tolist() == [0, 4, 0, 4, 4, 4, 4]
    params = state.tables.at(torch.tensor([2, 3]), torch.float64)
    assert params.ints("seed").tolist() == [-3, 0]
    assert params.ints("top_k").tolist() == [4, 0]
    assert params.floats("temperature").tolist() == [0.5, 0.0]
    assert params.floats("min_p").tolist() == [0.25, 0.0]


def test_new_pages_are_emptied_and_pages_with_a_prefix_are_not() -> None:
    """What a former owner left may be NaN, which would go through attention's mask."""
    state = tables_in_use()
    keys = state.pools.layers[0].keys
    keys.fill_(float("nan"))
    writes = PageWrites(pack_i32([2, 2]), pack_i32([0, 1]), pack_i32([19, 18]))
    bring(tenant(kv_len=PAGE_SIZE, writes=writes), state)
    assert (keys[18 * PAGE_SIZE : 19 * PAGE_SIZE] == 0).all()
    assert keys[19 * PAGE_SIZE :].isnan().all()
    assert keys[: 18 * PAGE_SIZE].isnan().all()
