"""Pages that go down to the tiers below the prefix cache, and sequences that wait for them to come
up, as scripts of events and effects.
"""

from __future__ import annotations

import msgspec
import pytest

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import GroupSpec, TierPolicy
from aserve.messages.output import Retired, StepOutput
from aserve.messages.requests import Grammar
from aserve.messages.results import MaskReady, SampleResult
from aserve.messages.step import Launch, Sample
from aserve.messages.transfers import KvLoaded, LoadKv, SaveKv, TiersChanged
from tests.scheduling.stage import Stage, cancel, ids, request, result, rows, spec

PROMPT = list(range(20, 33))  # three pages of 4, and a token


def stage(
    *, num_pages: int = 33, policy: TierPolicy = "write_through", window: int | None = None
) -> Stage:
    engine = msgspec.structs.replace(spec(num_pages=num_pages, depth=1, lead=1), kv_tiers=policy)
    if window is not None:
        groups = (*engine.groups, GroupSpec("window", num_pages, window))
        engine = msgspec.structs.replace(engine, groups=groups)
    return Stage(engine)


def with_stored_pages(*, window: int | None = None) -> Stage:
    """The three pages of the prompt are in the tiers, and the prefix cache has forgotten them."""
    one = stage(window=window)
    one.play(request("a", PROMPT, max_tokens=1))
    one.play(result(1, {1: [50]}))
    [saved] = one.of(SaveKv)
    one.play(TiersChanged(added=saved.keys))
    one.scheduler.state.cache.evict_all()
    one.play()
    assert one.of(SaveKv) == []
    return one


def test_a_page_goes_down_when_it_enters_the_prefix_cache() -> None:
    one = stage()
    one.play(request("a", PROMPT, max_tokens=3))
    pages = array_i32(one.batches[0].page_writes[0].pages).tolist()
    one.play(result(1, {1: [50]}))
    [saved] = one.of(SaveKv)
    assert array_i32(saved.pages[0]).tolist() == pages[2::-1]
    kinds = [type(effect) for effect in one.effects]
    assert kinds.index(SaveKv) < kinds.index(Launch)
    one.play(result(2, {1: [51]}))
    assert one.of(SaveKv) == []


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_an_evicted_page_goes_down_before_the_step_that_writes_it(
    policy: TierPolicy,
) -> None:
    """With write_through it was handed down before, and host memory had no place for it."""
    one = stage(num_pages=6, policy=policy)
    one.play(request("a", PROMPT, max_tokens=1))
    one.play(result(1, {1: [50]}))
    for saved in one.of(SaveKv):
        one.play(TiersChanged(removed=saved.keys))
    one.play(request("b", list(range(60, 77)), max_tokens=1))
    [batch] = one.batches
    [saved] = one.of(SaveKv)
    assert set(array_i32(saved.pages[0])) <= set(array_i32(batch.page_writes[0].pages).tolist())
    kinds = [type(effect) for effect in one.effects]
    assert kinds.index(SaveKv) < kinds.index(Launch)


def test_a_prompt_goes_on_behind_the_pages_that_came_up() -> None:
    one = with_stored_pages()
    one.play(request("b", [*PROMPT[:12], 1, 2]))
    [load] = one.of(LoadKv)
    assert (load.first, array_i32(load.token_ids).tolist()) == (0, PROMPT[:12])
    assert one.batches == []
    one.play(KvLoaded("b", 0, 3))
    [batch] = one.batches
    assert (ids(batch), array_i32(batch.kv_lens).tolist()) == ([1, 2], [12])
    hit = request("c", [*PROMPT[:12], 9])  # of the prefix cache, not of the tiers
    one.play(result(batch.iteration, {rows(batch)[0]: [60]}), hit)
    assert one.outputs[0].cached_len == 12
    assert one.of(LoadKv) == []
    assert 9 in ids(one.batches[0])


def test_what_did_not_come_is_computed_and_not_asked_for_again() -> None:
    one = with_stored_pages()
    one.play(request("b", PROMPT))
    one.play(KvLoaded("b", 0, 1))
    [batch] = one.batches
    assert (ids(batch), array_i32(batch.kv_lens).tolist()) == (PROMPT[4:], [4])


def test_without_the_pages_that_a_window_sees_the_prompt_is_computed() -> None:
    """It was admitted behind them, and has none for the positions before."""
    one = with_stored_pages(window=5)
    one.play(request("b", PROMPT))
    [load] = one.of(LoadKv)
    assert array_i32(load.pages[1]).tolist()[0] == 0
    one.play(KvLoaded("b", 0, 2))
    assert one.of(LoadKv) == []
    [batch] = one.batches
    assert (ids(batch), array_i32(batch.kv_lens).tolist()) == (PROMPT, [0])


def test_an_end_leaves_the_pages_to_the_load() -> None:
    one = with_stored_pages()
    one.play(request("b", PROMPT))
    one.play(cancel("b"))
    assert len(one.of(Retired)) == 1
    assert one.scheduler.state.cache.available(0) == 32 - 3
    one.play(KvLoaded("b", 0, 3))
    assert one.effects == []
    assert one.scheduler.state.cache.available(0) == 32


def test_a_sample_for_a_former_owner_of_the_row_is_not_for_the_one_that_loads() -> None:
    one = with_stored_pages()
    one.play(request("b", [1, 2, 3], grammar=Grammar("regex", "x", "structured_outputs")))
    [batch] = one.batches
    one.play(MaskReady("b", 0, 0, mask=b"\xff" * 16))
    assert len(one.of(Sample)) == 1
    one.play(result(batch.iteration, {}))
    one.play(cancel("b"), request("c", PROMPT))
    assert one.scheduler.state.running[rows(batch)[0]].request_id == "c"
    one.play(KvLoaded("c", 0, 3))
    late = (batch.rows, pack_i32([1]), pack_i32([52]))
    one.play(SampleResult(batch.iteration, *late))
    assert one.of(StepOutput) == []
