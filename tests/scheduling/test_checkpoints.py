"""Checkpoints of recurrent states: where they are taken, who waits for them, and what they cost."""

from __future__ import annotations

import itertools

import msgspec

from aserve.errors import StepError
from aserve.messages.base import array_i32
from aserve.messages.executor import DecodeCaps, SchedulerEvent
from aserve.messages.results import StepFailed
from aserve.messages.step import ScheduleBatch
from tests.scheduling.stage import Stage, query_lens, request, result, rows, spec

SYSTEM = list(range(1, 17))


def stage_of(
    *, num_checkpoints: int = 8, interval: int = 16, most: int = 1, **options: int
) -> Stage:
    """Pages of 4 tokens; a step decodes `most` tokens of a row."""
    return Stage(
        msgspec.structs.replace(
            spec(**{"depth": 1, "lead": 1, "num_pages": 65, **options}),
            decode=DecodeCaps(is_recurrent=True, max_tokens_per_step=most),
            num_checkpoints=num_checkpoints + 1,
            checkpoint_interval=interval,
        )
    )


def written(batch: ScheduleBatch) -> dict[int, int]:
    """By row, the position of the checkpoint that the step writes."""
    ends = [
        start + num
        for start, num in zip(array_i32(batch.kv_lens).tolist(), query_lens(batch), strict=True)
    ]
    by_row = dict(zip(rows(batch), ends, strict=True))
    taken = () if batch.states is None else array_i32(batch.states.written_rows).tolist()
    return {row: by_row[row] for row in taken}


def run(stage: Stage, *events: SchedulerEvent) -> list[ScheduleBatch]:
    """Plays until nothing is left to do; each row samples 99."""
    stage.play(*events)
    batches: list[ScheduleBatch] = []
    while stage.batches:
        [batch] = stage.batches
        batches.append(batch)
        samples = array_i32(batch.sample_rows).tolist()
        stage.play(result(batch.iteration, {row: [99] for row in samples}))
    return batches


def kv_lens(batches: list[ScheduleBatch]) -> list[list[int]]:
    return [array_i32(batch.kv_lens).tolist() for batch in batches]


def test_a_prefill_is_cut_at_its_last_whole_page_alone() -> None:
    batches = run(stage_of(), request("a", SYSTEM, max_tokens=1))
    assert list(map(query_lens, batches)) == [[12], [4]]
    assert list(map(written, batches)) == [{1: 12}, {}]


def test_a_prompt_that_is_shorter_than_a_part_of_the_interval_is_not_cut() -> None:
    batches = run(stage_of(interval=64), request("a", SYSTEM, max_tokens=1))
    assert list(map(query_lens, batches)) == [[16]]
    assert list(map(written, batches)) == [{}]


def test_short_prompts_that_begin_alike_do_not_wait_for_each_other() -> None:
    """Nobody would have a checkpoint behind which the others could begin."""
    asked = [request(f"r{number}", [*SYSTEM, number]) for number in range(3)]
    stage = stage_of(interval=128)
    stage.play(*asked)
    assert query_lens(stage.batches[0]) == [17, 17, 17]


def test_prompts_that_come_together_compute_their_common_pages_once() -> None:
    """The first is asked for a checkpoint where the others part with it."""
    asked = [
        request(f"r{number}", [*SYSTEM, number, 7, 8, 9, 10], max_tokens=1)
        for number in (50, 51, 52)
    ]
    batches = run(stage_of(), *asked)
    assert kv_lens(batches)[0] == [0]
    assert query_lens(batches[0]) == [16]
    assert written(batches[0]) == {1: 16}
    assert sorted(kv_lens(batches)[1]) == [16, 16, 16]


def test_the_second_prompt_with_a_prefix_leaves_a_checkpoint_behind_it() -> None:
    stage = stage_of()
    ends = ([50, 7, 8, 9, 10], [51, 7, 8, 9, 10], [52, 7, 8, 9, 10])
    starts = [
        kv_lens(run(stage, request(f"r{number}", [*SYSTEM, *end], max_tokens=1)))
        for number, end in enumerate(ends)
    ]
    assert starts == [[[0], [20]], [[0], [16], [20]], [[16], [20]]]


def test_chunks_leave_checkpoints_ever_further_apart() -> None:
    stage = stage_of(num_pages=200, max_batched_tokens=8, interval=8, num_checkpoints=40)
    stage.scheduler.state.spec = msgspec.structs.replace(
        stage.scheduler.state.spec, max_model_len=400
    )
    batches = run(stage, request("a", [5] * 200, max_tokens=1))
    places = [end for batch in batches for end in written(batch).values()]
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert gaps[:4] == [8, 8, 8, 8]
    assert max(gaps) == 24


def test_an_answer_keeps_its_newest_checkpoint_alone() -> None:
    stage = stage_of(num_checkpoints=3, interval=8)
    batches = run(stage, request("a", SYSTEM, max_tokens=40))
    places = [end for batch in batches for end in written(batch).values()]
    cache = stage.scheduler.state.cache.states
    assert places == [12, 20, 28, 36, 44, 52]
    assert cache is not None
    assert cache.checkpoints.num_free == 1


def test_the_next_turn_begins_behind_the_answers_last_checkpoint() -> None:
    stage = stage_of(interval=8)
    run(stage, request("a", SYSTEM, max_tokens=40))
    batches = run(stage, request("b", [*SYSTEM, *[99] * 40, 5, 6], max_tokens=1))
    assert kv_lens(batches)[0] == [52]
    assert batches[0].states is not None


def test_a_row_that_finds_no_free_checkpoint_goes_on_without_one() -> None:
    """The row that runs locks the only one."""
    stage = stage_of(num_checkpoints=1)
    stage.play(request("a", SYSTEM, max_tokens=30))
    stage.play(result(1, {}), request("b", [7] * 30, max_tokens=1))
    [batch] = stage.batches
    assert query_lens(batch) == [4, 30]
    assert written(batch) == {}


def test_a_row_begins_anew_at_its_last_checkpoint() -> None:
    stage = stage_of(depth=2, lead=2)
    stage.play(request("a", SYSTEM, max_tokens=8))
    stage.play(result(1, {}))
    stage.play(StepFailed(2, StepError("as the test wants it").info()))
    [batch] = stage.batches
    assert kv_lens([batch]) == [[12]]
    assert batch.states is not None
    assert array_i32(batch.states.read_rows).tolist() == [1]


def test_a_prompt_that_begins_anew_takes_its_checkpoint_again() -> None:
    stage = stage_of(depth=2, lead=2)
    stage.play(request("a", SYSTEM, max_tokens=8))
    stage.play(StepFailed(1, StepError("as the test wants it").info()))
    [batch] = stage.batches
    assert kv_lens([batch]) == [[0]]
    assert written(batch) == {1: 12}


def test_a_step_with_drafts_leaves_no_checkpoint_because_some_may_be_rejected() -> None:
    stage = stage_of(most=2, interval=4)
    stage.play(request("a", SYSTEM[:14], max_tokens=8))
    stage.play(result(1, {}))
    stage.play(result(2, {1: [99]}))
    [batch] = stage.batches
    assert kv_lens([batch]) == [[14]]
    assert query_lens(batch) == [2]
    assert written(batch) == {}


def test_a_row_whose_length_is_not_certain_leaves_no_checkpoint() -> None:
    """Its last step has a draft, and is in flight."""
    stage = stage_of(most=2, interval=4, depth=2, lead=2)
    stage.play(request("a", SYSTEM[:13], max_tokens=4))
    stage.play(result(1, {}))
    stage.play(result(2, {1: [99]}))
    [batch] = stage.batches
    assert kv_lens([batch]) == [[15]]
    assert batch.bounds == b"\1"
    assert query_lens(batch) == [1]
    assert written(batch) == {}
