"""Who gets a row and tokens of a step, in which order, and how much work that is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve.cache.kv_cache import KvCache
from aserve.messages.base import array_i32
from aserve.messages.output import Refused, Retired
from aserve.messages.step import ScheduleBatch
from aserve.scheduling.rows import NO_CELLS
from tests.scheduling.stage import Stage, cancel, query_lens, request, result, rows, spec


def answer(stage: Stage, batch: ScheduleBatch) -> None:
    sampled = array_i32(batch.sample_rows).tolist()
    stage.play(result(batch.iteration, {row: [7] for row in sampled}))


def test_a_short_request_of_better_priority_is_fed_before_a_long_prefill() -> None:
    stage = Stage(spec(depth=1, lead=1, max_batched_tokens=8, num_pages=65))
    stage.play(request("long", list(range(60)), max_tokens=1, priority=10))
    assert query_lens(stage.batches[0]) == [8]
    first = stage.batches[0]
    stage.play(request("short", [90, 91, 92], max_tokens=1, priority=-10))
    answer(stage, first)
    assert (rows(stage.batches[0]), query_lens(stage.batches[0])) == ([2, 1], [3, 5])


def test_a_worse_leader_is_not_waited_for() -> None:
    """The short prompt is a prefix of the long one, but nobody waits for a worse priority."""
    stage = Stage(spec(depth=1, lead=1, max_batched_tokens=4, num_pages=65))
    stage.play(request("long", list(range(40)), max_tokens=1, priority=5))
    first = stage.batches[0]
    stage.play(request("short", list(range(9)), max_tokens=1, priority=0))
    answer(stage, first)
    assert rows(stage.batches[0]) == [2]


@pytest.mark.parametrize(("n", "code"), [(8, None), (9, "exceeds_kv_capacity")])
def test_more_sequences_than_rows_and_queue_hold_are_refused_for_ever(
    n: int, code: str | None
) -> None:
    """4 rows and 4 places in the queue. An idle engine would never have room: no 429."""
    stage = Stage(spec())
    stage.play(request("r", [1, 2, 3], n=n))
    refusals = stage.of(Refused)
    assert [refusal.error.code for refusal in refusals] == ([code] if code else [])
    for refusal in refusals:
        assert refusal.error.status == 400
        assert "n = 9 sequences" in refusal.error.message
        assert "at most 8" in refusal.error.message


def test_siblings_wait_until_the_shared_pages_are_there_and_are_looked_at_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matches: list[int] = []
    match = KvCache.match

    def counted(cache: KvCache, *args: Any, **options: Any) -> Any:
        matches.append(1)
        return match(cache, *args, **options)

    monkeypatch.setattr(KvCache, "match", counted)
    stage = Stage(msgspec.structs.replace(spec(depth=1, lead=1), max_rows=8))
    stage.play(request("r", list(range(41)), n=6, max_tokens=1))
    state = stage.scheduler.state
    assert (len(state.running), len(state.waiting), state.num_followers) == (1, 0, 5)
    answer(stage, stage.batches[0])
    assert len(rows(stage.batches[0])) == 5
    while stage.batches:
        answer(stage, stage.batches[0])
    assert stage.scheduler.is_idle
    assert len(matches) == 1 + 2 * 5


def test_a_follower_that_is_cancelled_leaves_nothing_behind() -> None:
    stage = Stage(spec(depth=1, lead=1))
    stage.play(request("a", list(range(30)), max_tokens=1), request("b", list(range(30))))
    assert stage.scheduler.state.num_followers == 1
    stage.play(cancel("b"))
    assert [end.request_id for end in stage.of(Retired)] == ["b"]
    state = stage.scheduler.state
    assert (state.num_followers, state.num_waiting) == (0, 0)
    assert not any(row.followers for row in state.running.values())


def test_waiting_sequences_share_their_cells_until_one_is_looked_at() -> None:
    stage = Stage(spec(max_rows=1))
    stage.play(request("a", [1, 2, 3]), request("b", [4, 5]), request("c", [6, 7, 8, 9]))
    waiting = {sequence.request_id: sequence for sequence in stage.scheduler.state.waiting}
    assert all(each.cells is NO_CELLS for each in waiting.values())
    left = {name: (each.remaining, each.cached_len) for name, each in waiting.items()}
    assert left == {"b": (2, -1), "c": (4, -1)}
    waiting["b"].is_blocked = True
    assert (waiting["b"].remaining, waiting["b"].cached_len, waiting["c"].is_blocked) == (2, -1, 0)
