"""A planner that remembers its last step makes the plans that `plan_step` makes of every batch."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from aserve.gpu.sampling.plan import RowParams, SamplePlan
from aserve.gpu.step.plan import StepPlan, plan_step
from aserve.gpu.step.repeated import StepPlanner
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.step import RowInit, ScheduleBatch, VerifyPlan
from tests.gpu.batch_builder import greedy, schedule_batch

MAX_ROWS, VOCAB = 6, 40
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 3},
    {"presence_penalty": 0.5},
    {"num_logprobs": 2},
    {"end_ids": (1,), "min_len": 30},
    {"bad_word_ids": ((3, 4),)},
    {"num_prompt_logprobs": 1, "prompt_len": 5},
    {"embeds": True, "prompt_len": 9},
)


def random_batch(rng: random.Random, iteration: int) -> ScheduleBatch:
    rows = sorted(rng.sample(range(1, MAX_ROWS + 1), rng.randint(1, 4)))
    query_lens = [rng.choice((1, 1, 1, 2, 3)) for _ in rows]
    kv_lens = [rng.randint(0, 20) for _ in rows]
    ids = [rng.randrange(VOCAB) for _ in range(sum(query_lens))]
    sampled = [row for row in rows if rng.random() < 0.8]
    others = [row for row in rows if row not in sampled and rng.random() < 0.5]
    drafts = [length - 1 for length in query_lens]
    return schedule_batch(
        rows,
        query_lens,
        ids,
        kv_lens,
        iteration=iteration,
        bounds=bytes(rng.random() < 0.2 for _ in rows),
        sample_rows=pack_i32(sampled),
        held_rows=pack_i32(others),
        verify=VerifyPlan(pack_i32(drafts)) if rng.random() < 0.3 else None,
    )


def next_batch(rng: random.Random, batch: ScheduleBatch) -> ScheduleBatch:
    """Mostly the same rows with other ids and lengths, and sometimes another change."""
    kv_lens = array_i32(batch.kv_lens) + array_i32(batch.query_lens)
    rows = array_i32(batch.rows)
    changes: dict[str, Any] = {
        "iteration": batch.iteration + 1,
        "kv_lens": kv_lens.tobytes(),
        "input_ids": pack_i32([rng.randrange(VOCAB) for _ in array_i32(batch.input_ids)]),
        "next_ids": pack_i32([rng.randrange(VOCAB) for _ in rows]),
        "expects": pack_i32([rng.randrange(9) for _ in rows]),
        "row_inits": (),
    }
    match rng.randrange(12):
        case 0:
            return random_batch(rng, batch.iteration + 1)
        case 1:
            changes["sample_rows"] = batch.sample_rows[4:]
        case 2:
            changes["bounds"] = bytes(rng.random() < 0.5 for _ in rows)
        case 3:
            changes["row_inits"] = (random_init(rng, int(rows[0])),)
        case 4:
            changes["held_rows"] = b""
        case 5:
            changes["verify"] = None
    return msgspec.structs.replace(batch, **changes)


def random_init(rng: random.Random, row: int) -> RowInit:
    return greedy(row, **rng.choice(CHANGES))


def assert_equal(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, tuple | list):
        assert isinstance(found, tuple | list)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif dataclasses.is_dataclass(expected):
        is_unread = isinstance(expected, SamplePlan) and not (
            expected.adds_to_logits or expected.bans
        )
        for field in dataclasses.fields(expected):
            if not (is_unread and field.name == "max_len"):
                assert_equal(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


@pytest.mark.parametrize("seed", range(40))
def test_plans_are_those_that_each_batch_alone_would_have(seed: int) -> None:
    rng = random.Random(seed)
    params = RowParams(MAX_ROWS)
    params.write([random_init(rng, row) for row in range(1, MAX_ROWS + 1)])
    planner = StepPlanner(params, vocab_size=VOCAB, slice_len=5)
    batch = random_batch(rng, 1)
    for _ in range(60):
        params.write(batch.row_inits)
        plan = planner.plan(batch)
        assert_equal(plan, plan_step(batch, params, vocab_size=VOCAB, slice_len=5))
        batch = next_batch(rng, batch)


def plans_of(*batches: ScheduleBatch, inits: tuple[RowInit, ...]) -> list[StepPlan]:
    params = RowParams(MAX_ROWS)
    params.write(inits)
    planner = StepPlanner(params, vocab_size=VOCAB, slice_len=8)
    return [planner.plan(batch) for batch in batches]


def test_a_step_of_the_same_rows_shares_what_was_planned_of_their_logits() -> None:
    batches = [schedule_batch([2, 5], [1, 1], [-2, -5], [length, 7]) for length in (3, 4)]
    first, second = plans_of(*batches, inits=(greedy(2), greedy(5, temperature=1.0, top_k=4)))
    assert second.logits is first.logits
    assert second.rows is first.rows
    assert second.kv_lens.tolist() == [4, 7]
    assert second.len_bounds.tolist() == [5, 8]


def test_a_row_with_a_penalty_is_planned_anew_because_its_history_grows() -> None:
    batches = [schedule_batch([2], [1], [-2], [length]) for length in (3, 4)]
    _, second = plans_of(*batches, inits=(greedy(2, presence_penalty=1.0),))
    assert second.logits.slices[0].max_len == 5
