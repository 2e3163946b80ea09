"""Prompts that are not causal, as those of an embedding encoder: each is computed in one step, and
nobody else uses its KV. Pictures whose tokens see each other are not cut either, and others use the
KV before, in and behind them.
"""

from __future__ import annotations

import msgspec
import numpy as np

from aserve.messages.base import array_i32
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import AdmitRequest
from aserve.picture import PixelScale, make_picture
from tests.scheduling.stage import Stage, query_lens, request, result, rows, spec

PROMPT = [5, 6, 7, 8, 9, 10]


def whole(name: str, prompt: list[int] = PROMPT, *, max_tokens: int = 0) -> AdmitRequest:
    asked = request(name, prompt, max_tokens=max_tokens)
    return msgspec.structs.replace(asked, is_causal=False, embeds=not max_tokens)


def test_prompts_that_do_not_fit_into_one_step_together_take_one_each() -> None:
    stage = Stage(spec(max_batched_tokens=8))
    stage.play(whole("a"), whole("b"))
    assert [query_lens(batch) for batch in stage.batches] == [[6], [6]]
    stage.play(result(1, {}), result(2, {}))
    assert [end.request_id for end in stage.of(Retired)] == ["a", "b"]


def test_a_prompt_that_no_step_can_compute_is_refused_with_the_numbers() -> None:
    stage = Stage(spec(max_batched_tokens=5))
    stage.play(whole("a"))
    [refused] = stage.effects
    assert isinstance(refused, Refused)
    assert "6 tokens are more than the 5 of a step" in refused.error.message


def test_equal_prompts_are_computed_twice_and_leave_nothing_in_the_cache() -> None:
    stage = Stage(spec(depth=1, lead=1))
    stage.play(whole("a"), whole("b"))
    assert [query_lens(batch) for batch in stage.batches] == [[6, 6]]
    stage.play(result(1, {}), request("c", PROMPT))
    [batch] = stage.batches
    assert array_i32(batch.kv_lens).tolist() == [0]


def test_decodes_wait_a_step_for_a_prompt_that_does_not_fit_beside_them() -> None:
    stage = Stage(spec(depth=1, lead=1, max_batched_tokens=6))
    stage.play(request("a", [1, 2]))
    stage.play(result(1, {1: [50]}), whole("b", max_tokens=3))
    [batch] = stage.batches
    assert (rows(batch), query_lens(batch)) == ([2], [6])
    stage.play(result(2, {2: [60]}))
    [batch] = stage.batches
    assert (rows(batch), query_lens(batch)) == ([1, 2], [1, 1])


def test_a_prompt_waits_for_all_its_pages() -> None:
    stage = Stage(spec(depth=1, lead=1, num_pages=4))
    stage.play(request("a", [1, 2, 3, 4, 5], max_tokens=2))
    stage.play(result(1, {1: [50]}), whole("b"))
    assert [rows(batch) for batch in stage.batches] == [[1]]
    stage.play(result(2, {1: [51]}))
    assert [query_lens(batch) for batch in stage.batches] == [[6]]


def pictured(name: str, *, start: int, num: int, after: int = 3) -> AdmitRequest:
    """A prompt with a picture of `num` tokens, all in one row, that see each other."""
    shape = np.zeros((1, num, 3), np.uint8)
    scale = PixelScale(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    picture = make_picture(shape, side=1, scale=scale, sees_itself=True)
    ids = [*range(10, 10 + start), *[7] * num, *range(30, 30 + after)]
    asked = request(name, ids, max_tokens=2)
    placed = msgspec.structs.replace(picture, start=start)
    return msgspec.structs.replace(asked, pictures=(placed,))


def chunks_of(stage: Stage, *, num_steps: int) -> list[list[int]]:
    """The query lengths of the next steps, whose results say nothing."""
    found = []
    for iteration in range(1, num_steps + 1):
        [batch] = stage.batches
        found.append(query_lens(batch))
        stage.play(result(iteration, {}))
    return found


def test_a_chunk_ends_before_a_picture_that_it_would_cut() -> None:
    stage = Stage(spec(depth=1, lead=1, max_batched_tokens=6))
    stage.play(pictured("a", start=4, num=5))
    assert chunks_of(stage, num_steps=2) == [[4], [6]]


def test_decodes_wait_a_step_for_a_picture_that_does_not_fit_beside_them() -> None:
    stage = Stage(spec(depth=1, lead=1, max_batched_tokens=6))
    stage.play(request("a", [1, 2]))
    stage.play(result(1, {1: [50]}), pictured("b", start=2, num=6))
    [batch] = stage.batches
    assert (rows(batch), query_lens(batch)) == ([1, 2], [1, 2])
    stage.play(result(2, {1: [51]}))
    [batch] = stage.batches
    assert (rows(batch), query_lens(batch)) == ([2], [6])


def test_a_picture_that_no_step_can_compute_is_refused_with_the_numbers() -> None:
    stage = Stage(spec(max_batched_tokens=5))
    stage.play(pictured("a", start=2, num=6))
    [refused] = stage.effects
    assert isinstance(refused, Refused)
    assert "the picture's 6 tokens are more than the 5 of a step" in refused.error.message


def test_a_picture_waits_for_all_its_pages() -> None:
    """Of three pages of four tokens one is free beside the row that decodes."""
    stage = Stage(spec(depth=1, lead=1, num_pages=5))
    stage.play(request("a", [1, 2, 3, 4, 5], max_tokens=2))
    stage.play(result(1, {1: [50]}), pictured("b", start=1, num=10, after=1))
    assert [rows(batch) for batch in stage.batches] == [[1]]
    stage.play(result(2, {1: [51]}))
    assert [query_lens(batch) for batch in stage.batches] == [[12]]


def test_a_prefix_with_a_picture_is_shared() -> None:
    stage = Stage(spec(depth=1, lead=1))
    stage.play(pictured("a", start=2, num=6))
    stage.play(result(1, {1: [50]}), pictured("b", start=2, num=6))
    [batch] = stage.batches
    assert array_i32(batch.kv_lens).tolist()[-1] == 8
