"""How a step's tokens are shared between rows that decode and prompts that join them."""

from __future__ import annotations

import msgspec

from aserve.messages.executor import EngineSpec
from tests.scheduling.stage import Stage, query_lens, request, result, spec


def bounded(*, max_mixed_prefill_tokens: int | None, max_rows: int = 4) -> EngineSpec:
    engine = spec(max_rows=max_rows, num_pages=2000, max_batched_tokens=64, depth=1, lead=1)
    return msgspec.structs.replace(
        engine, max_model_len=4000, max_mixed_prefill_tokens=max_mixed_prefill_tokens
    )


def decoding(engine: EngineSpec) -> Stage:
    """One row decodes; its next token is in flight."""
    stage = Stage(engine)
    stage.play(request("a", [1, 2, 3], max_tokens=60))
    stage.play(result(1, {1: [9]}))
    assert [query_lens(batch) for batch in stage.batches] == [[1]]
    return stage


def test_prompts_beside_decodes_are_bounded_until_they_are_done() -> None:
    stage = decoding(bounded(max_mixed_prefill_tokens=5))
    stage.play(request("b", [4] * 12))
    seen = []
    for iteration in range(2, 6):
        sampled = {1: [9], 2: [9]} if iteration == 5 else {1: [9]}
        stage.play(result(iteration, sampled))
        seen += [query_lens(batch) for batch in stage.batches]
    assert seen == [[1, 5], [1, 5], [1, 2], [1, 1]]


def test_without_a_bound_prompts_take_what_decodes_leave() -> None:
    stage = decoding(bounded(max_mixed_prefill_tokens=None))
    stage.play(request("b", [4] * 80))
    stage.play(result(2, {1: [9]}))
    assert [query_lens(batch) for batch in stage.batches] == [[1, 63]]


def test_where_more_rows_begin_than_go_on_more_prompt_tokens_join() -> None:
    stage = decoding(bounded(max_mixed_prefill_tokens=5, max_rows=8))
    stage.play(*(request(name, [ord(name)] * 8) for name in "bcd"))
    stage.play(result(2, {1: [9]}))
    assert [query_lens(batch) for batch in stage.batches] == [[1, 8, 7]]
    stage.play(result(3, {1: [9], 2: [9]}))
    assert [query_lens(batch) for batch in stage.batches] == [[1, 1, 1, 5]]
