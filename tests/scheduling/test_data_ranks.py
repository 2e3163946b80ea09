"""Data-parallel ranks: which rank a sequence goes to, whose rows are retracted, and that a step
fails and recovers on all ranks together.
"""

from __future__ import annotations

import msgspec
import pytest

from aserve.errors import StepError
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import EngineSpec, GroupSpec
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.messages.results import StepFailed
from aserve.messages.step import Launch, Resync
from tests.scheduling.stage import Stage, query_lens, request, result, rows, spec
from tests.traces import Trace, TraceRun


def ranked(*, num_pages: int = 65, **changes: object) -> EngineSpec:
    engine = msgspec.structs.replace(spec(depth=2, lead=2), dp_size=2, max_rows=4, page_size=4)
    engine = msgspec.structs.replace(engine, groups=(GroupSpec("full", num_pages),))
    return msgspec.structs.replace(engine, **changes)


def launched(stage: Stage) -> list[list[list[int]]]:
    """The rows of each rank in each launch."""
    return [[rows(batch) for batch in each.batches] for each in stage.of(Launch)]


def test_sequences_go_where_fewer_tokens_run_and_a_rank_without_rows_has_an_idle_batch() -> None:
    stage = Stage(ranked(depth=1, lead=1))
    stage.play(request("a", [*range(3, 12)], max_tokens=4))
    assert launched(stage) == [[[1], []]]
    idle = stage.batches[1]
    assert (idle.iteration, idle.input_ids, idle.stats.num_running) == (1, b"", 0)
    assert stage.batches[0].stats.total_pages == 2 * 64
    stage.play(request("b", [*range(20, 24)]), request("c", [*range(30, 33)]))
    stage.play(result(1, {1: [7]}))
    assert launched(stage) == [[[1], [2, 4]]]  # rows of rank 1 are even ones


def answer(stage: Stage, *requests: AdmitRequest) -> None:
    """Gives every row that the last launch samples a token, after the requests have come."""
    sampled = [row for batch in stage.batches for row in array_i32(batch.sample_rows).tolist()]
    iteration = stage.batches[0].iteration
    stage.play(*requests, result(iteration, {row: [7] for row in sampled}))


def test_a_sequence_goes_where_its_prefix_is_cached_if_there_is_room() -> None:
    stage = Stage(ranked(depth=1, lead=1, num_pages=9))
    stem = [*range(3, 25)]
    stage.play(request("a", [40, 41], max_tokens=9), request("b", stem, max_tokens=9))
    assert launched(stage) == [[[1], [2]]]
    answer(stage, request("c", [*stem[:4], 9], max_tokens=1))
    assert launched(stage) == [[[1], [2, 4]]]
    assert query_lens(stage.batches[1]) == [1, 1]  # all but the last token of c was cached there
    answer(stage, request("d", [*stem[:8], *range(50, 58)], max_tokens=2))
    assert launched(stage) == [[[1, 3], [2]]]
    assert query_lens(stage.batches[0]) == [1, 16]


def test_only_the_rank_without_room_retracts() -> None:
    stage = Stage(ranked(depth=1, lead=1, num_pages=9))
    names = {"a": (9, 11), "b": (8, 20), "c": (8, 20), "d": (1, 11)}
    stage.play(
        *(
            request(name, [*range(20 * n + 3, 20 * n + 3 + length)], max_tokens=max_tokens)
            for n, (name, (length, max_tokens)) in enumerate(names.items())
        )
    )
    assert launched(stage) == [[[1, 3], [2, 4]]]
    while not stage.scheduler.state.num_retracted:
        answer(stage)
    running = [row.request_id for row in stage.scheduler.state.running.values()]
    assert running == ["a", "b", "d"]


def test_a_flood_gives_way_on_the_rank_where_the_other_client_gets_its_row() -> None:
    stage = Stage(ranked(depth=1, lead=1))
    lengths = {"a0": 5, "a1": 9, "a2": 5, "a3": 9}
    stage.play(
        *(
            request(name, [n + 3, *range(20, 19 + length)], max_tokens=9, client="a")
            for n, (name, length) in enumerate(lengths.items())
        )
    )
    assert launched(stage) == [[[1, 3], [2, 4]]]
    answer(stage, request("b0", [60, 61], max_tokens=9, client="b"))
    running = [row.request_id for row in stage.scheduler.state.running.values()]
    assert running == ["a0", "a1", "a3", "b0"]


def test_each_rank_has_the_whole_token_budget() -> None:
    stage = Stage(ranked(depth=1, lead=1, max_batched_tokens=8))
    stage.play(*(request(f"r{n}", [*range(10 * n + 3, 10 * n + 9)]) for n in range(3)))
    assert [query_lens(batch) for batch in stage.batches] == [[6, 2], [6]]


def test_a_step_that_fails_on_one_rank_is_run_again_on_all() -> None:
    stage = Stage(ranked())
    stage.play(request("a", [3, 4, 5], max_tokens=9), request("b", [6, 7, 8], max_tokens=9))
    assert launched(stage) == [[[1], [2]], [[1], [2]]]
    error = StepError("rank 1 broke").info()
    stage.play(StepFailed(1, error), StepFailed(2, error))
    assert [effect.iteration for effect in stage.of(Resync)] == [3]
    assert launched(stage) == [[[1], []]]  # half of the suspects, alone
    assert [init.row for init in stage.batches[0].row_inits] == [1]
    stage.play(result(3, {1: [7]}))
    assert launched(stage) == [[[], [2]]]


@pytest.mark.parametrize("seed", range(4))
def test_crowded_ranks_retract_their_own_rows_and_lose_nothing(seed: int) -> None:
    """Few pages, failures, cancels and many requests with common beginnings."""
    engine = ranked(num_pages=9, max_rows=7, max_waiting=64, max_batched_tokens=12, vocab_size=11)
    requests = tuple(
        AdmitRequest(
            f"r{number}",
            pack_i32([*range(1, 3 + number % 5), number % 11]),
            SamplingParams(seed=number, max_tokens=9 + number % 9, n=1 + number % 2),
            client="ab"[number % 2],
        )
        for number in range(14)
    )
    run = TraceRun(Trace(engine, requests, seed, cancel_rate=0.02, fail_rate=0.03))
    run.run()
    assert run.scheduler.num_retracted > 3
    assert run.ranks.num_idle > 0
    assert not run.refused
