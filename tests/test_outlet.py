"""Gateway and outlet: every request's chunks reach its reader, once, in order, and then it ends."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.errors import EngineDead
from aserve.messages import (
    Cancel,
    GenerateRequest,
    OutputChunk,
    SamplingParams,
    TextPrompt,
    Usage,
    pack_i32,
)
from aserve.outlet import Gateway


class Bench:
    def __init__(self) -> None:
        self.submitted: list[GenerateRequest] = []
        self.cancels: list[Cancel] = []
        self.gateway = Gateway(submit=self.submitted.append, cancel=self.cancels.append)


def request(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id, TextPrompt("a"), SamplingParams(seed=1))


def chunk(
    request_id: str, text: str, *, child: int = 0, is_last: bool = False, count: int = 1
) -> OutputChunk:
    return OutputChunk(
        request_id, child, text, pack_i32([7] * count), Usage(1, count), is_last=is_last
    )


async def test_chunks_arrive_while_they_come_and_end_after_the_last() -> None:
    bench = Bench()
    outlet = bench.gateway.open(request("r"))
    seen: list[str] = []

    async def read() -> None:
        async for item in outlet:
            seen.append(item.text)
            bench.gateway.deliver(chunk("r", "b", is_last=True))

    reader = asyncio.create_task(read())
    bench.gateway.deliver(chunk("r", "a"))
    async with asyncio.timeout(5):
        await reader
    assert seen == ["a", "b"]
    assert (bench.gateway.num_open, bench.cancels) == (0, [])


Events = st.lists(st.tuples(st.sampled_from(["r", "s"]), st.integers(0, 2)), max_size=12)


@given(Events, st.sets(st.integers(0, 12)))
def test_however_slow_the_reader_is_it_gets_the_same_text_and_the_end_comes_last(
    events: list[tuple[str, int]], reads: set[int]
) -> None:
    async def scenario() -> None:
        bench = Bench()
        outlet = bench.gateway.open(request("r"), request("s"))
        batches = outlet.batches(idle_s=0)
        received: list[OutputChunk] = []
        for i, (request_id, child) in enumerate(events):
            bench.gateway.deliver(chunk(request_id, f"{i},", child=child))
            if i in reads:
                received += await anext(batches)
        for request_id in "rs":
            bench.gateway.deliver(chunk(request_id, "end", child=1, is_last=True))
        async for batch in batches:
            received += batch
        for name in ("r", "s"):
            of_request = [item for item in received if item.request_id == name]
            assert [item.is_last for item in of_request] == [False] * (len(of_request) - 1) + [True]
            for child in range(3):
                expected = "".join(
                    f"{i}," for i, event in enumerate(events) if event == (name, child)
                )
                text = "".join(item.text for item in of_request if item.child == child)
                assert text == expected + ("end" if child == 1 else "")

    asyncio.run(scenario())


async def test_a_reader_that_was_away_gets_one_chunk_per_child() -> None:
    bench = Bench()
    outlet = bench.gateway.open(request("r"))
    for i in range(5):
        bench.gateway.deliver(chunk("r", str(i), child=i % 2))
    received = await anext(outlet.batches())
    assert [(item.child, item.text, len(item.token_ids)) for item in received] == [
        (0, "024", 12),
        (1, "13", 8),
    ]


async def test_the_prompts_ids_of_a_first_chunk_outlive_the_chunks_after_it() -> None:
    bench = Bench()
    outlet = bench.gateway.open(request("r"))
    first = msgspec.structs.replace(chunk("r", "a"), prompt_ids=pack_i32([3, 4]))
    for item in (first, chunk("r", "b"), chunk("r", "c", is_last=True)):
        bench.gateway.deliver(item)
    (merged,) = [item async for item in outlet]
    assert (merged.text, merged.prompt_ids) == ("abc", pack_i32([3, 4]))


async def test_silence_is_reported_and_does_not_end_the_answer() -> None:
    bench = Bench()
    batches = bench.gateway.open(request("r")).batches(idle_s=0.001)
    assert await anext(batches) == []
    bench.gateway.deliver(chunk("r", "a"))
    assert [item.text for item in await anext(batches)] == ["a"]


async def test_leaving_cancels_what_still_runs_once_with_what_was_given_out() -> None:
    bench = Bench()
    outlet = bench.gateway.open(request("r"), request("s"))
    bench.gateway.deliver(chunk("r", "a", is_last=True))
    bench.gateway.deliver(chunk("s", "a", count=3))
    outlet.cancel()
    outlet.cancel()
    assert bench.cancels == [Cancel("s", None, 3, "cancelled")]
    bench.gateway.deliver(chunk("s", "late", is_last=True))
    assert [item async for item in outlet] == []
    assert bench.gateway.num_open == 0


async def test_leaving_after_the_end_cancels_nothing() -> None:
    bench = Bench()
    outlet = bench.gateway.open(request("r"))
    bench.gateway.deliver(chunk("r", "a", is_last=True))
    assert [item.text async for item in outlet] == ["a"]
    outlet.cancel()
    assert bench.cancels == []


async def test_leaving_ends_a_reader_that_waits() -> None:
    bench = Bench()
    outlet = bench.gateway.open(request("r"))
    asyncio.get_running_loop().call_soon(outlet.cancel)
    async with asyncio.timeout(5):
        assert [batch async for batch in outlet.batches()] == []


async def test_when_the_engine_ends_every_open_request_ends_with_its_error() -> None:
    bench = Bench()
    outlets = [bench.gateway.open(request("r"), request("s")), bench.gateway.open(request("t"))]
    bench.gateway.deliver(chunk("r", "a"))
    bench.gateway.end_all(EngineDead("gone").info())
    for outlet, count in zip(outlets, (2, 1), strict=True):
        errors = [item.error for item in [item async for item in outlet] if item.is_last]
        assert [error and error.code for error in errors] == ["engine_dead"] * count
    assert bench.cancels == []


async def test_drained_waits_for_the_last_open_request() -> None:
    bench = Bench()
    await bench.gateway.drained()
    bench.gateway.open(request("r"))
    leaving = bench.gateway.open(request("s"))
    bench.gateway.deliver(chunk("r", "a", is_last=True))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bench.gateway.drained()
    leaving.cancel()
    async with asyncio.timeout(5):
        await bench.gateway.drained()


@pytest.mark.parametrize("request_id", ["", "r", "request", "other"])
async def test_ids_are_matched_whole(request_id: str) -> None:
    """Trap 13: one of one character must not stand for all that begin with it."""
    bench = Bench()
    outlet = bench.gateway.open(request("req"))
    bench.gateway.deliver(chunk(request_id, "stray", is_last=True))
    bench.gateway.deliver(chunk("req", "mine", is_last=True))
    assert [item.text async for item in outlet] == ["mine"]
