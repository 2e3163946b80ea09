"""Who gets what is scarce: tokens of a step, pages of a pool, and the turn after a failure."""

from __future__ import annotations

import msgspec

from aserve.errors import StepError
from aserve.messages.executor import DecodeCaps, EngineSpec, GroupSpec
from aserve.messages.results import StepFailed
from tests.scheduling.stage import Stage, cancel, query_lens, request, result, rows, spec


def test_the_row_that_waited_longest_decodes_first_so_that_none_starves() -> None:
    """The verify window of one row takes all tokens of a step."""
    stage = Stage(spec(depth=1, lead=1, max_batched_tokens=3, window=3))
    stage.play(request("a", [1]), request("b", [2]))
    named: list[list[int]] = []
    for iteration in range(1, 6):
        (batch,) = stage.batches
        named.append(rows(batch))
        stage.play(result(iteration, {row: [50] for row in rows(batch)}))
    assert named == [[1, 2], [1], [2], [1], [2]]


def test_a_prompt_waits_until_its_first_token_fits_too() -> None:
    """Row 1 holds one of three pages; the prompt of b fills the other two, and its first output
    would need a fourth.
    """
    stage = Stage(spec(depth=1, lead=1, num_pages=4))
    stage.play(request("a", [1, 2, 3], max_tokens=2), request("b", list(range(8)), max_tokens=4))
    assert rows(stage.batches[0]) == [1]
    assert stage.batches[0].stats.num_waiting == 1
    stage.play(result(1, {1: [9]}))
    assert rows(stage.batches[0]) == [1]
    stage.play(result(2, {1: [9]}))
    assert (rows(stage.batches[0]), query_lens(stage.batches[0])) == ([1], [8])


def test_prompts_that_fit_together_begin_in_one_step() -> None:
    """Pages that the first one takes in this step must not be counted against the second again."""
    stage = Stage(spec(depth=1, lead=1, page_size=1, num_pages=18, max_batched_tokens=13))
    first, second = list(range(10)), list(range(50, 53))
    stage.play(request("a", first, max_tokens=3), request("b", second, max_tokens=3))
    assert query_lens(stage.batches[0]) == [10, 3]


def _windowed(num_pages: int) -> EngineSpec:
    """Prefills run without decodes beside them; pages of one token, a window of 4."""
    return msgspec.structs.replace(
        spec(depth=2, lead=1, page_size=1, max_batched_tokens=16, num_pages=65),
        groups=(GroupSpec("full", 65), GroupSpec("window", num_pages, 4)),
        decode=DecodeCaps(mixes_prefill=False),
    )


def test_a_prefill_leaves_the_other_rows_the_pages_of_their_next_step() -> None:
    """The windowed group has 8 free pages when b's prompt of 20 begins. It could take all of them,
    and then row 1 could not decode in the step behind it: one of the two would have to give way.
    """
    stage = Stage(_windowed(num_pages=10))
    stage.play(request("a", [1]))
    stage.play(result(1, {1: [50]}), request("b", list(range(2, 22))))
    prefill, decode = stage.batches
    assert (rows(prefill), query_lens(prefill)) == ([2], [7])
    assert (rows(decode), query_lens(decode)) == ([1], [1])
    assert decode.stats.num_retracted == 0


def test_a_half_whose_rows_have_all_left_is_passed_over_at_once() -> None:
    """Else nothing would be in flight, and no event would ever come."""
    stage = Stage(spec(depth=1, lead=1))
    stage.play(*[request(name, [number, 2]) for number, name in enumerate("abcd")])
    stage.play(StepFailed(1, StepError("injected").info()), cancel("a"), cancel("b"))
    assert rows(stage.batches[0]) == [3, 4]
