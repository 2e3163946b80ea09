"""What a batch says of the pages that all its rows share."""

from __future__ import annotations

import msgspec

from aserve.messages.step import ScheduleBatch
from aserve.scheduling.finish import retract
from tests.scheduling.stage import Stage, request, result, rows, spec

PROMPT = [*range(10, 21)]  # two pages of four, and three tokens of a third


def stage(*, names: bool = True) -> Stage:
    return Stage(msgspec.structs.replace(spec(depth=1, lead=1), names_shared_pages=names))


def play_prompts(play: Stage, *prompts: list[int]) -> ScheduleBatch:
    """The first alone, so that the others find its pages; then one step with all of them."""
    play.play(request("0", prompts[0]))
    assert play.batches[0].shared_pages == 0
    others = [request(str(number), prompt) for number, prompt in enumerate(prompts) if number]
    play.play(result(play.batches[0].iteration, {1: [1]}), *others)
    return step(play, play.batches[0])


def step(play: Stage, batch: ScheduleBatch) -> ScheduleBatch:
    play.play(result(batch.iteration, {row: [1] for row in rows(batch)}))
    return play.batches[0]


def test_whole_pages_of_a_common_prompt_are_named_and_none_that_is_written_to() -> None:
    batch = play_prompts(stage(), PROMPT, PROMPT, PROMPT)
    assert (rows(batch), batch.shared_pages) == ([1, 2, 3], 2)


def test_a_prompt_that_differs_inside_a_page_shares_those_before_it() -> None:
    batch = play_prompts(stage(), PROMPT, [*PROMPT[:6], 7, 7, 7, 7])
    assert (rows(batch), batch.shared_pages) == ([1, 2], 1)


def test_one_row_with_another_prompt_leaves_nothing_to_share() -> None:
    assert play_prompts(stage(), PROMPT, PROMPT, [5, *PROMPT]).shared_pages == 0


def test_a_row_that_gave_way_shares_its_prefix_again_when_it_is_back() -> None:
    play = stage()
    batch = play_prompts(play, PROMPT, PROMPT, [*PROMPT[:4], *range(50, 60)])
    assert (len(rows(batch)), batch.shared_pages) == (3, 1)
    retract(play.scheduler.state, play.scheduler.state.running[2])
    batch = step(play, batch)
    assert (len(rows(batch)), batch.shared_pages) == (3, 1)


def test_only_who_asks_for_it_is_told() -> None:
    assert play_prompts(stage(names=False), PROMPT, PROMPT).shared_pages == 0
