"""Gateway and request stream: every request's chunks reach its reader, once, in order, and then it
ends.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aserve.errors import EngineDead, ExpectedWait, InvalidRequest, QueueFull
from aserve.messages.base import pack_i32
from aserve.messages.changes import Amend
from aserve.messages.output import OutputChunk, Usage
from aserve.messages.requests import Cancel, GenerateRequest, SamplingParams, TextPrompt
from aserve.messages.scored import TokenLogprob, TopLogprob
from aserve.request_stream import Capacity, Gateway
from aserve.unread import BATCH_BYTES, UnreadAnswer, size_of


class Bench:
    def __init__(self, *, max_unread_bytes: int = 16 << 20) -> None:
        self.submitted: list[GenerateRequest] = []
        self.cancels: list[Cancel | Amend] = []
        self.gateway = Gateway(
            submit=self.submitted.append,
            cancel=self.cancels.append,
            max_unread_bytes=max_unread_bytes,
        )


def request(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id, TextPrompt("a"), SamplingParams(seed=1))


def chunk(
    request_id: str, text: str, *, child: int = 0, is_last: bool = False, count: int = 1
) -> OutputChunk:
    return OutputChunk(
        request_id, child, text, pack_i32([7] * count), Usage(1, count), is_last=is_last
    )


Events = st.lists(st.tuples(st.sampled_from(["r", "s"]), st.integers(0, 2)), max_size=12)


@given(Events, st.sets(st.integers(0, 12)))
def test_however_slow_the_reader_is_it_gets_the_same_text_and_the_end_comes_last(
    events: list[tuple[str, int]], reads: set[int]
) -> None:
    async def scenario() -> None:
        bench = Bench()
        request_stream = bench.gateway.open(request("r"), request("s"))
        batches = request_stream.batches(idle_s=0)
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
    request_stream = bench.gateway.open(request("r"))
    for i in range(5):
        item = chunk("r", str(i), child=i % 2)
        if i == 0:
            item = msgspec.structs.replace(item, prompt_ids=pack_i32([3, 4]))
        bench.gateway.deliver(item)
    received = await anext(request_stream.batches())
    assert received[0].prompt_ids == pack_i32([3, 4])
    assert [(item.child, item.text, len(item.token_ids)) for item in received] == [
        (0, "024", 12),
        (1, "13", 8),
    ]


async def test_an_error_comes_behind_the_unread_text_of_every_child_and_has_none() -> None:
    bench = Bench()
    request_stream = bench.gateway.open(request("r"))
    for child in range(2):
        bench.gateway.deliver(chunk("r", str(child), child=child))
    error = EngineDead("it ended").info()
    bench.gateway.deliver(OutputChunk("r", 0, "", b"", Usage(), error=error, is_last=True))
    received = await anext(request_stream.batches())
    assert [(item.child, item.text, item.error) for item in received] == [
        (0, "0", None),
        (1, "1", None),
        (0, "", error),
    ]


async def test_silence_is_reported_and_does_not_end_the_answer() -> None:
    bench = Bench()
    batches = bench.gateway.open(request("r")).batches(idle_s=0.001)
    assert await anext(batches) == []
    bench.gateway.deliver(chunk("r", "a"))
    assert [item.text for item in await anext(batches)] == ["a"]


async def test_leaving_cancels_what_still_runs_once() -> None:
    bench = Bench()
    request_stream = bench.gateway.open(request("r"), request("s"))
    bench.gateway.deliver(chunk("r", "a", is_last=True))
    bench.gateway.deliver(chunk("s", "a", count=3))
    request_stream.cancel()
    request_stream.cancel()
    assert bench.cancels == [Cancel("s", None, 0, "cancelled")]
    bench.gateway.deliver(chunk("s", "late", is_last=True))
    assert [item async for item in request_stream] == []
    assert bench.gateway.num_open == 0


async def test_leaving_ends_a_reader_that_waits() -> None:
    bench = Bench()
    request_stream = bench.gateway.open(request("r"))
    asyncio.get_running_loop().call_soon(request_stream.cancel)
    async with asyncio.timeout(60):
        assert [batch async for batch in request_stream.batches()] == []


async def test_when_the_engine_ends_every_open_request_ends_with_its_error() -> None:
    bench = Bench()
    request_streams = [
        bench.gateway.open(request("r"), request("s")),
        bench.gateway.open(request("t")),
    ]
    bench.gateway.deliver(chunk("r", "a"))
    bench.gateway.end_all(EngineDead("gone").info())
    for request_stream, count in zip(request_streams, (2, 1), strict=True):
        errors = [item.error for item in [item async for item in request_stream] if item.is_last]
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
    async with asyncio.timeout(60):
        await bench.gateway.drained()


@pytest.mark.parametrize("request_id", ["", "r", "request", "other"])
async def test_ids_are_matched_whole(request_id: str) -> None:
    """Trap 13: one of one character must not stand for all that begin with it."""
    bench = Bench()
    request_stream = bench.gateway.open(request("req"))
    bench.gateway.deliver(chunk(request_id, "stray", is_last=True))
    bench.gateway.deliver(chunk("req", "mine", is_last=True))
    assert [item.text async for item in request_stream] == ["mine"]


def scored(request_id: str, num_tokens: int, *, num_top: int = 20) -> OutputChunk:
    top = tuple(TopLogprob(300 + i, "abc", b"abc", -1.5) for i in range(num_top))
    tokens = tuple(TokenLogprob(7, "x", b"x", -0.5, top, i) for i in range(num_tokens))
    return msgspec.structs.replace(chunk(request_id, "x" * num_tokens), logprobs=tokens)


async def test_what_nobody_reads_is_bounded_and_then_cancelled() -> None:
    bench = Bench(max_unread_bytes=1 << 20)
    request_stream = bench.gateway.open(request("r"), request("s"))
    closed: list[int] = []
    request_stream.bound_unread(lambda: closed.append(1))
    batches = request_stream.batches()
    bench.gateway.deliver(chunk("r", "a"))
    await anext(batches)
    most = 0
    while not closed:
        bench.gateway.deliver(scored("r", 10))
        most = max(most, request_stream.unread_bytes)
    assert 0.9 * (1 << 20) < most <= 1 << 20
    assert (request_stream.unread_bytes, bench.gateway.num_open) == (0, 0)
    assert {cancel.request_id for cancel in bench.cancels} == {"r", "s"}
    bench.gateway.deliver(scored("r", 10))  # what was in flight falls away
    assert request_stream.unread_bytes == 0
    with pytest.raises(UnreadAnswer, match="1048576 bytes"):
        await anext(batches)
    assert closed == [1]


async def test_much_that_waits_is_given_in_batches_of_bounded_size() -> None:
    """One after the other, with a turn of the loop between them, and the request's end last."""
    bench = Bench()
    request_stream = bench.gateway.open(request("r"))
    for child in range(4):
        for _ in range(1000):
            part = msgspec.structs.replace(scored("r", 5), child=child)
            bench.gateway.deliver(part)
    bench.gateway.deliver(chunk("r", "end", is_last=True))
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    batches = [batch async for batch in request_stream.batches()]
    sizes = [sum(map(size_of, batch)) for batch in batches]
    assert len(batches) > 20
    assert max(sizes) <= 2 * BATCH_BYTES
    assert turns, "others had their turn"
    assert sum(len(item.logprobs) for batch in batches for item in batch) == 4 * 1000 * 5
    assert [item.is_last for batch in batches for item in batch].index(True) == (
        sum(map(len, batches)) - 1
    )


def group(request_id: str, n: int) -> GenerateRequest:
    return GenerateRequest(request_id, TextPrompt("a"), SamplingParams(seed=1, n=n))


async def test_an_engine_that_never_answers_is_given_no_more_than_it_could_hold() -> None:
    bench = Bench()
    bench.gateway.capacity = Capacity(max_rows=4, max_waiting=16)
    for number in range(6):
        bench.gateway.open(group(f"r{number}", 4))
    with pytest.raises(QueueFull, match="holds 24 sequences") as caught:
        bench.gateway.open(group("late", 1))
    assert caught.value.status == 429
    assert caught.value.info().wait == ExpectedWait(24 - 4 + 1, None)
    assert (bench.gateway.num_open, len(bench.submitted)) == (6, 6)
    bench.gateway.deliver(chunk("r3", "", is_last=True))
    bench.gateway.open(group("later", 4))
    assert bench.gateway.num_open == 6


async def test_a_call_that_no_engine_could_ever_admit_is_refused_with_the_numbers() -> None:
    bench = Bench()
    bench.gateway.capacity = Capacity(max_rows=4, max_waiting=16)
    for requests in ([group("a", 21)], [group("a", 10), group("b", 11)]):
        with pytest.raises(InvalidRequest, match=r"21 sequences .* 4 at once .* 16 wait") as caught:
            bench.gateway.open(*requests)
        assert caught.value.info().status == 400
    bench.gateway.open(group("a", 20))
    assert len(bench.submitted) == 1


async def test_a_silent_stream_yields_empty_batches_and_a_busy_one_none() -> None:
    bench = Bench()
    request_stream = bench.gateway.open(request("r"))
    batches = request_stream.batches(idle_s=0.15)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30):
        for _ in range(30):
            loop.call_later(0.01, bench.gateway.deliver, chunk("r", "a"))
            assert await anext(batches), "it is never idle for so long"
        since_s = loop.time()
        assert [await anext(batches) for _ in range(2)] == [[], []]
    assert loop.time() - since_s > 0.25
    request_stream.cancel()
    assert [batch async for batch in batches] == []


class Taker:
    """A receiver of offered chunks that takes them while `is_free`."""

    def __init__(self) -> None:
        self.is_free = True
        self.texts: list[str] = []

    def take(self, offered: OutputChunk) -> bool:
        if self.is_free:
            self.texts.append(offered.text)
        return self.is_free


@given(st.lists(st.sampled_from(["chunk", "turn", "block", "unblock"]), max_size=30))
@example(["turn", "block", "chunk", "unblock", "chunk"])
def test_chunks_that_are_taken_and_those_that_are_read_are_one_text(actions: list[str]) -> None:
    """A reader that waits is not woken for what is taken, and sees the end."""

    async def scenario() -> None:
        bench, taker = Bench(), Taker()
        request_stream = bench.gateway.open(request("r"))

        async def read() -> None:
            async for chunks in request_stream.batches(offer=taker.take):
                taker.texts += [item.text for item in chunks]

        reading = asyncio.create_task(read())
        for number, action in enumerate(actions):
            match action:
                case "chunk":
                    bench.gateway.deliver(chunk("r", f"{number},"))
                case "turn":
                    await asyncio.sleep(0)
                case _:
                    taker.is_free = action == "unblock"
        bench.gateway.deliver(chunk("r", "end", is_last=True))
        for _ in range(20):
            await asyncio.sleep(0)
        assert reading.done()
        sent = [f"{number}," for number, action in enumerate(actions) if action == "chunk"]
        assert "".join(taker.texts) == "".join([*sent, "end"])

    asyncio.run(scenario())


async def test_a_chunk_that_is_taken_is_no_silence() -> None:
    bench, taker = Bench(), Taker()
    loop = asyncio.get_running_loop()
    request_stream = bench.gateway.open(request("r"))
    silent = asyncio.ensure_future(anext(request_stream.batches(idle_s=0.2, offer=taker.take)))
    await asyncio.sleep(0)
    for delay_s in (0.1, 0.2):
        loop.call_later(delay_s, bench.gateway.deliver, chunk("r", "a"))
    start_s = loop.time()
    async with asyncio.timeout(60):
        assert await silent == []
    assert loop.time() - start_s >= 0.35
    assert taker.texts == ["a", "a"]
