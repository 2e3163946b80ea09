"""Which decode steps are replayed, in which shape, and what padding makes of them on the host."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve.gpu.cudagraph.shapes import (
    FILTER,
    GREEDY,
    NOISE,
    ShapeTable,
    StepShape,
    padding_plan,
    row_counts,
    shape_of,
)
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import StepPlan, plan_step
from aserve.messages.base import pack_i32
from aserve.messages.step import PageWrites, RowInit, VerifyPlan
from tests.fakes.hash_model import VOCAB, HashModel
from tests.gpu.batch_builder import greedy, schedule_batch
from tests.gpu.drive import make_executor

PAGE_SIZE = 4
WARM: dict[str, Any] = {"temperature": 0.7}


def step(*inits: RowInit, query_lens: tuple[int, ...] = (), **changes: Any) -> StepPlan:
    """A step of the rows that `inits` name, one token each, all sampled."""
    rows = [init.row for init in inits]
    query_lens = query_lens or (1,) * len(rows)
    kv_lens = [10 * row for row in rows]
    batch = schedule_batch(rows, query_lens, [5] * sum(query_lens), kv_lens, page_writes=())
    facts = RowParams(6)
    facts.write(inits)
    return plan_step(
        msgspec.structs.replace(batch, **changes), facts, vocab_size=VOCAB, slice_len=8
    )


def writes(*each: tuple[int, int, int]) -> PageWrites:
    """Of a row, a column, and its page."""
    rows, columns, pages = zip(*each, strict=True) if each else ((), (), ())
    return PageWrites(pack_i32(rows), pack_i32(columns), pack_i32(pages))


def window(width: int, *page_writes: PageWrites) -> StepPlan:
    verify = VerifyPlan(pack_i32([width - 1]))
    return step(greedy(1), query_lens=(width,), verify=verify, page_writes=page_writes)


@pytest.mark.parametrize(
    ("plan", "shape"),
    [
        (step(greedy(1)), StepShape(1, 1, GREEDY)),
        (step(greedy(1), greedy(2), greedy(4)), StepShape(3, 1, GREEDY)),
        (step(greedy(1), greedy(2, **WARM)), StepShape(2, 1, NOISE)),
        (step(greedy(1, **WARM), greedy(2, **WARM, top_k=3)), StepShape(2, 1, FILTER)),
        (
            step(greedy(1), greedy(2), query_lens=(2, 2), verify=VerifyPlan(pack_i32([1, 1]))),
            StepShape(2, 2, GREEDY),
        ),
        (
            step(greedy(1), greedy(2), page_writes=(writes((2, 5, 7)), writes())),
            StepShape(2, 1, GREEDY),
        ),
        (step(greedy(1), skips_drafter=True), StepShape(1, 1, GREEDY, skips_drafter=True)),
        # What needs more than a graph has runs eagerly.
        (step(), None),
        (step(greedy(1), greedy(2), query_lens=(1, 2)), None),
        (step(greedy(1), query_lens=(2,)), None),
        (step(greedy(1), greedy(2), query_lens=(2, 1), verify=VerifyPlan(pack_i32([1, 0]))), None),
        (step(greedy(1), query_lens=(2,), verify=VerifyPlan(pack_i32([2]))), None),
        (step(greedy(1), greedy(2), sample_rows=pack_i32([2])), None),
        (step(greedy(1), greedy(2), sample_rows=pack_i32([1]), held_rows=pack_i32([2])), None),
        (step(greedy(1), greedy(2, presence_penalty=0.5)), None),
        (step(greedy(1, logit_bias=((3, 1.0),))), None),
        (step(greedy(1, end_ids=(3,), prompt_len=2, min_len=4)), None),
        (step(greedy(1, allowed_ids=(3, 4))), None),
        (step(greedy(1, num_logprobs=0)), None),
        (step(greedy(1, embeds=True, prompt_len=11)), None),
        (step(greedy(1), row_inits=(greedy(1),)), None),
        (step(greedy(1), page_writes=(writes((1, 0, 3)), writes((1, 0, 3), (1, 1, 4)))), None),
        (window(5, writes((1, 0, 3), (1, 1, 4))), StepShape(1, 5, GREEDY)),
        (window(4, writes((1, 0, 3), (1, 1, 4))), None),
    ],
)
def test_decodes_whose_rows_are_alike_have_a_shape(plan: StepPlan, shape: StepShape | None) -> None:
    assert shape_of(plan, PAGE_SIZE) == shape


@pytest.mark.parametrize(
    ("max_rows", "counts"),
    [
        (0, ()),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_the_counts_of_rows_end_with_the_largest(max_rows: int, counts: tuple[int, ...]) -> None:
    assert row_counts(max_rows) == counts


def test_a_shape_gets_the_least_graph_with_room_or_none() -> None:
    table = ShapeTable(counts=(1, 2, 4), widths=(1,), samplings=(GREEDY, NOISE))
    assert table.padded(StepShape(3, 1, NOISE)) == StepShape(4, 1, NOISE)
    assert table.padded(StepShape(2, 1, GREEDY)) == StepShape(2, 1, GREEDY)
    assert table.padded(StepShape(5, 1, GREEDY)) is None
    assert table.padded(StepShape(2, 2, GREEDY)) is None
    assert table.padded(StepShape(2, 1, FILTER)) is None
    assert [shape.num_rows for shape in table.at_start()] == [4, 4, 2, 2, 1, 1]


def test_steps_that_skip_the_drafter_have_graphs_of_their_own() -> None:
    table = ShapeTable((1, 2), widths=(1, 5), samplings=(GREEDY,), has_skips=True)
    skips = [shape for shape in table.at_start() if shape.skips_drafter]
    assert skips == [StepShape(count, 1, GREEDY, skips_drafter=True) for count in (2, 1)]
    assert len({*table.at_start()}) == 6
    spec = make_executor(HashModel()).spec
    for shape in (StepShape(2, 1, GREEDY), skips[0]):
        plan = padding_plan(shape, spec, slice_len=8)
        assert plan.batch.skips_drafter == shape.skips_drafter


def test_shapes_of_late_widths_have_few_rows_and_are_not_captured_at_the_start() -> None:
    table = ShapeTable((1, 2, 4, 8), widths=(1,), samplings=(GREEDY,), late_widths={25: 4, 3: 8})
    assert table.padded(StepShape(3, 25, GREEDY)) == StepShape(4, 25, GREEDY)
    assert table.padded(StepShape(5, 25, GREEDY)) is None
    assert table.padded(StepShape(5, 3, GREEDY)) == StepShape(8, 3, GREEDY)
    assert {shape.width for shape in table.at_start()} == {1}
    assert [(shape.num_rows, shape.width) for shape in table.largest()] == [(8, 1), (4, 25), (8, 3)]


def test_a_capture_knows_of_the_host_what_holds_for_every_step_of_its_shape() -> None:
    plan = padding_plan(StepShape(3, 1, FILTER), make_executor(HashModel()).spec, slice_len=8)
    assert plan.len_bounds.tolist() == [64] * 3
    assert not plan.is_exact
    [part] = plan.logits.slices
    assert (part.num, part.max_len, part.max_top_k) == (3, 64, VOCAB)
    assert part.needs_noise
    assert part.needs_filter
