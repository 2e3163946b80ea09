"""Sequences whose KV comes from elsewhere: they await it with a row and pages, and each of them
ends with one last message and no page lost, whatever happens meanwhile.
"""

from __future__ import annotations

import msgspec
import pytest

from aserve.errors import StepError
from aserve.messages.base import CancelReason, array_i32, pack_i32
from aserve.messages.executor import GroupSpec
from aserve.messages.output import Retired, StepOutput
from aserve.messages.requests import Cancel, FailRequest
from aserve.messages.results import MaskReady, SampleResult, StepFailed, StepTimes
from aserve.messages.step import Launch, Resync
from aserve.messages.transfers import KvFailed, KvReady, ReceiveKv, SendKv, StreamKv
from tests.fakes.toy_device import TOY
from tests.scheduling.stage import Stage, cancel, ids, request, result, rows, spec

PROMPT = [5, 6, 7, 8, 9]
ERROR = StepError("the other engine is gone").info()


def ready(name: str = "a") -> KvReady:
    return KvReady(name, 0)


def num_free(stage: Stage) -> int:
    """Pages that somebody could get."""
    return stage.scheduler.state.cache.available(0)


def awaiting(num_pages: int = 33, *, depth: int = 2) -> Stage:
    stage = Stage(spec(num_pages=num_pages, depth=depth, lead=depth))
    stage.play(request("a", PROMPT, awaits_kv=True))
    return stage


def test_a_sequence_decodes_from_kv_that_was_computed_elsewhere() -> None:
    stage = awaiting()
    [transfer] = stage.effects
    assert isinstance(transfer, ReceiveKv)
    assert (transfer.request_id, transfer.num_tokens) == ("a", 5)
    [pages] = transfer.pages
    assert len(array_i32(pages)) == 2
    stage.play(ready())
    assert stage.of(StepOutput) == []
    decode = stage.batches[0]
    assert (ids(decode), array_i32(decode.kv_lens).tolist()) == ([9], [4])
    assert array_i32(decode.expects).tolist() == [0]
    assert [init.row for init in decode.row_inits] == rows(decode) == [1]
    assert decode.page_writes[0].pages == pages


def test_drafts_begin_when_the_drafter_has_followed_a_step_of_the_row() -> None:
    """Drafts seem not to pay, so the steps of the row's former request have skipped the drafter,
    and the choice of then still holds when the row has its new request."""
    stage = Stage(spec(depth=1, lead=1, max_rows=1, window=3))
    stage.play(StepTimes((1, 5), (1.0, 2.0), {0: (1.1, 2.2), 2: (2.85, 5.7)}, {}))
    stage.play(request("b", [1, 2, 3], max_tokens=40))
    is_skipped: list[bool] = []
    while not any(is_skipped):
        [batch] = stage.batches
        is_skipped.append(batch.skips_drafter)
        stage.play(result(batch.iteration, {1: [50]}))
    stage.play(cancel("b"), request("a", PROMPT, max_tokens=40, awaits_kv=True))
    stage.play(result(batch.iteration + 1, {1: [50]}))
    stage.play(ready())
    is_followed = False
    for _ in range(9):
        [batch] = stage.batches
        assert batch.verify is None or is_followed
        is_followed = not batch.skips_drafter
        stage.play(result(batch.iteration, {1: [50]}))


def test_a_sequence_that_is_alone_without_pages_for_all_its_kv_computes_it_here() -> None:
    """Its cached prefix locks a page of the window's group, which is full without it."""
    groups = (GroupSpec("full", 22), GroupSpec("window", 5, window=2))
    stage = Stage(msgspec.structs.replace(spec(page_size=1, depth=1, lead=1), groups=groups))
    stage.play(request("b", PROMPT[:1], max_tokens=1))
    stage.play(result(1, {1: [50]}))
    stage.play(request("a", PROMPT, awaits_kv=True))
    assert stage.of(ReceiveKv) == []
    assert array_i32(stage.batches[0].kv_lens).tolist() == [1]


def test_kv_that_came_is_cached_for_others() -> None:
    stage = awaiting()
    stage.play(ready())
    stage.play(result(1, {1: [50]}), request("b", [*PROMPT[:4], 1]))
    [batch] = stage.batches
    assert array_i32(batch.kv_lens).tolist()[rows(batch).index(2)] == 4


def test_a_transfer_begins_when_no_step_can_write_its_pages() -> None:
    stage = Stage(spec())
    stage.play(request("b", [1, 2, 3]))
    assert [batch.iteration for batch in stage.batches] == [1, 2]
    stage.play(request("a", PROMPT, awaits_kv=True))
    assert stage.of(ReceiveKv) == []
    stage.play(result(1, {1: [50]}))
    assert stage.of(ReceiveKv) == []
    stage.play(result(2, {1: [51]}))
    assert len(stage.of(ReceiveKv)) == 1


def test_a_transfer_begins_when_no_held_row_is_sampled_any_more_that_had_its_pages() -> None:
    """The step is back, but its drafter writes when the row is sampled."""
    stage = Stage(spec(depth=1, lead=1))
    stage.play(request("b", [1, 2, 3], grammar=TOY))
    stage.play(MaskReady("b", 0, 0, b"\xff" * 16))
    stage.play(result(1, {}))
    stage.play(cancel("b"), request("a", PROMPT, awaits_kv=True))
    assert stage.of(ReceiveKv) == []
    stage.play(SampleResult(1, pack_i32([1]), pack_i32([1]), pack_i32([7])))
    assert len(stage.of(ReceiveKv)) == 1


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "shutdown", "stop"])
@pytest.mark.parametrize("last", [ready(), KvFailed("a", 0, ERROR)])
def test_an_end_leaves_the_pages_to_the_transfer(
    reason: CancelReason, last: KvReady | KvFailed
) -> None:
    stage = awaiting()
    before = num_free(stage)
    stage.play(Cancel("a", None, 0, reason))
    [end] = stage.effects
    assert isinstance(end, Retired)
    assert end.reason == reason
    assert stage.scheduler.state.rows.num_free == 4
    assert num_free(stage) == before == 30
    stage.play(last)
    assert stage.effects == []
    assert num_free(stage) == 32


def test_an_end_before_the_transfer_began_gives_the_pages_back_at_once() -> None:
    stage = Stage(spec(depth=3))
    stage.play(request("b", [1, 2, 3]))
    stage.play(request("a", PROMPT, awaits_kv=True))
    assert stage.scheduler.state.rows.num_free == 2
    free = num_free(stage)
    stage.play(FailRequest("a", ERROR))
    assert [end.error for end in stage.of(Retired)] == [ERROR]
    assert num_free(stage) == free + 2
    stage.play(result(1, {1: [50]}))
    stage.play(result(2, {1: [51]}))
    assert stage.of(ReceiveKv) == []


def test_a_sequence_whose_transfer_fails_is_computed_here() -> None:
    stage = awaiting(depth=1)
    stage.play(KvFailed("a", 0, ERROR))
    assert stage.of(Retired) == []
    [batch] = stage.batches
    assert (ids(batch), array_i32(batch.kv_lens).tolist()) == (PROMPT, [0])
    stage.play(ready())
    assert stage.effects == []


def with_cached_page() -> Stage:
    """The first page of the prompt is cached, and nothing runs."""
    stage = awaiting(depth=1)
    stage.play(ready())
    stage.play(Cancel("a", None, 0, "cancelled"), result(1, {1: [50]}))
    return stage


def test_a_prefix_hit_is_not_transferred() -> None:
    stage = with_cached_page()
    prompt = [*PROMPT[:4], *range(20, 26)]
    stage.play(request("b", prompt, awaits_kv=True))
    [transfer] = stage.of(ReceiveKv)
    assert (transfer.first, transfer.num_tokens) == (4, 10)
    assert array_i32(transfer.token_ids).tolist() == prompt
    stage.play(ready("b"))
    assert (ids(stage.batches[0]), array_i32(stage.batches[0].kv_lens).tolist()) == ([25], [9])


def test_no_more_than_a_page_is_computed_here() -> None:
    stage = with_cached_page()
    stage.play(request("b", [*PROMPT[:4], 1, 2, 3, 4], awaits_kv=True))
    assert stage.of(ReceiveKv) == []
    assert ids(stage.batches[0]) == [1, 2, 3, 4]


def test_the_same_prompt_is_transferred_once() -> None:
    stage = awaiting(depth=1)
    stage.play(request("b", PROMPT, awaits_kv=True))
    assert stage.of(ReceiveKv) == []
    stage.play(ready())
    [batch] = stage.batches
    assert stage.of(ReceiveKv) == []
    assert ids(batch) == [9, 9]


def test_kv_that_another_engine_wants_is_announced_after_each_chunk() -> None:
    stage = Stage(spec(max_batched_tokens=4, depth=1, lead=1))
    stage.play(request("a", [*PROMPT, 10, 11], max_tokens=0, sends_kv=True))
    assert stage.of(SendKv) == []
    stage.play(result(1, {}))
    [first] = stage.of(SendKv)
    assert (first.request_id, first.num_tokens) == ("a", 4)
    stage.play(result(2, {}))
    [last] = stage.of(SendKv)
    assert last.num_tokens == 7
    assert [array_i32(pages).tolist()[:1] for pages in last.pages] == [
        array_i32(pages).tolist()[:1] for pages in first.pages
    ]
    kinds = [type(effect) for effect in stage.effects]
    assert kinds.index(SendKv) < kinds.index(Retired)


def test_kv_that_another_engine_wants_is_announced_before_its_step() -> None:
    stage = Stage(spec(max_batched_tokens=4, depth=2, lead=2))
    stage.play(request("a", [*PROMPT, 10, 11], max_tokens=0, sends_kv=True))
    announced = [(each.iteration, each.first, each.stop) for each in stage.of(StreamKv)]
    assert announced == [(1, 0, 4), (2, 4, 7)]  # both steps are in flight
    kinds = [type(effect) for effect in stage.effects if isinstance(effect, StreamKv | Launch)]
    assert kinds == [StreamKv, Launch, StreamKv, Launch]


def test_a_failed_step_of_others_leaves_a_transfer_alone() -> None:
    stage = awaiting()
    stage.play(request("b", [1, 2, 3]))
    stage.play(StepFailed(1, ERROR))
    assert len(stage.of(Resync)) == 1
    stage.play(ready())
    stage.play(result(3, {2: [50]}))
    mine = [batch for batch in stage.batches if 1 in rows(batch)]
    assert array_i32(mine[0].kv_lens).tolist()[rows(mine[0]).index(1)] == 4


def test_a_row_that_awaits_kv_is_not_retracted() -> None:
    """The other row lacks a page and waits, though it came first."""
    stage = Stage(spec(num_pages=5, depth=1, lead=1))
    stage.play(request("b", [1, 2, 3], max_tokens=12))
    stage.play(result(1, {1: [50]}), request("a", PROMPT, max_tokens=3, awaits_kv=True))
    for iteration in range(2, 7):
        assert len(stage.batches) == 1
        stage.play(result(iteration, {1: [50 + iteration]}))
    assert stage.batches == []
    assert stage.scheduler.state.num_retracted == 0
    stage.play(ready())
    assert stage.scheduler.state.num_retracted == 1
    assert len(stage.batches) == 1
