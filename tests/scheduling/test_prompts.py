"""Requests that want something of their prompt: scores or an embedding, and maybe no token."""

from __future__ import annotations

import msgspec

from aserve.errors import StepError
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.output import Retired
from aserve.messages.requests import AdmitRequest
from aserve.messages.results import PromptLogprobs, RowEmbedding, StepFailed, StepResult
from aserve.scheduling.finish import retract
from tests.scheduling.stage import Stage, query_lens, request, result, spec

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def scored(name: str, prompt: list[int], *, max_tokens: int = 0, n: int = 1) -> AdmitRequest:
    asked = request(name, prompt, max_tokens=max_tokens, n=n)
    sampling = msgspec.structs.replace(asked.sampling, prompt_logprobs=1)
    return msgspec.structs.replace(asked, sampling=sampling)


def embedded(name: str, prompt: list[int]) -> AdmitRequest:
    return msgspec.structs.replace(request(name, prompt, max_tokens=0), embeds=True)


def scores(
    iteration: int, row: int, positions: range, tokens: dict[int, list[int]] | None = None
) -> StepResult:
    """A score says its position, so that a test can see whose it is."""
    run = PromptLogprobs(
        row=row,
        position=positions.start,
        chosen=pack_i32(list(positions)),
        ranks=pack_i32(list(positions)),
        top_ids=pack_i32(list(positions)),
        top_logprobs=pack_i32(list(positions)),
    )
    return msgspec.structs.replace(result(iteration, tokens or {}), prompt_logprobs=(run,))


def embedding(iteration: int, row: int) -> StepResult:
    found = RowEmbedding(row, b"12345678")
    return msgspec.structs.replace(result(iteration, {}), embeddings=(found,))


def given(stage: Stage) -> list[PromptLogprobs]:
    scores = [output.prompt_logprobs for output in stage.outputs]
    return [each for each in scores if each is not None]


def reasons(stage: Stage) -> list[str]:
    return [effect.reason for effect in stage.of(Retired)]


def test_without_tokens_a_request_ends_when_its_last_chunk_is_back() -> None:
    stage = Stage(spec(max_batched_tokens=4))
    stage.play(request("a", PROMPT, max_tokens=0))
    assert [query_lens(batch) for batch in stage.batches] == [[4], [4]]
    assert all(batch.sample_rows == batch.held_rows == b"" for batch in stage.batches)
    stage.play(result(1, {}))
    assert [query_lens(batch) for batch in stage.batches] == [[2]]
    assert array_i32(stage.batches[0].next_ids).tolist() == [-1]
    stage.play(result(2, {}))
    assert stage.effects == []
    stage.play(result(3, {}))
    assert reasons(stage) == ["length"]
    assert stage.scheduler.is_idle


def test_a_prompt_is_scored_for_its_first_child_alone() -> None:
    stage = Stage(spec())
    stage.play(scored("a", PROMPT, max_tokens=3, n=2))
    stage.play(scores(1, 1, range(1, 10), {1: [42]}))
    inits = [init for batch in stage.batches for init in batch.row_inits]
    assert [init.num_prompt_logprobs for init in inits] == [-1]
    assert stage.batches[0].stats.num_cached_tokens == 8


def test_after_a_retraction_a_prompt_is_scored_from_where_its_scores_end() -> None:
    """Six scores are out; the page of the first four tokens is cached, so it goes on from there."""
    stage = Stage(spec(depth=1, lead=1, max_batched_tokens=6))
    stage.play(scored("a", PROMPT))
    stage.play(scores(1, 1, range(1, 7)))
    assert [run.position for run in given(stage)] == [1]
    state = stage.scheduler.state
    retract(state, state.running[1])
    stage.play(StepFailed(2, StepError("lost").info()))
    (batch,) = stage.batches
    assert (array_i32(batch.kv_lens).tolist(), query_lens(batch)) == ([4], [6])
    stage.play(scores(3, 1, range(5, 10)))
    (rest,) = given(stage)
    assert (rest.position, array_i32(rest.chosen).tolist()) == (7, [7, 8, 9])
    assert array_i32(rest.top_ids).tolist() == array_i32(rest.ranks).tolist() == [7, 8, 9]
    assert reasons(stage) == ["length"]


def test_who_is_retracted_with_all_of_its_prompt_in_flight_still_ends() -> None:
    stage = Stage(spec())
    stage.play(embedded("a", PROMPT))
    state = stage.scheduler.state
    retract(state, state.running[1])
    stage.play(embedding(1, 1))
    assert [output.embedding for output in stage.outputs] == [b"12345678"]
    assert reasons(stage) == ["length"]
    assert stage.scheduler.is_idle
