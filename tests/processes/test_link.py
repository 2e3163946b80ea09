"""A link over real socket pairs: all arrives, whole and in order, and nobody is blocked."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from aserve.frames import FrameSplitter, framed
from aserve.messages.base import Message
from aserve.processes.link import MAX_IN_FRAME, Link

LARGER_THAN_ANY_BUFFER = 8 << 20


class Said(Message, frozen=True):
    number: int
    data: bytes = b""


class End:
    """A link, what it was given, and how it ended."""

    def __init__(self, sock: socket.socket) -> None:
        self.heard: list[Said] = []
        self.ends: list[Exception | None] = []
        self.has_ended = asyncio.Event()
        self.changed = asyncio.Event()
        self._sock = sock
        self.unsendable: list[Said] = []
        self.link = Link[Said, Said](
            "link",
            kind=Said,
            deliver=self._hear,
            on_end=self._end,
            on_unsendable=self.unsendable.append,
        )

    async def open(self) -> None:
        await self.link.open(self._sock)
        self.link.start(lambda name, error: None)

    async def close(self) -> None:
        await self.link.stop()
        await self.link.close(timeout_s=5)

    async def until_heard(self, count: int) -> list[Said]:
        while len(self.heard) < count:
            self.changed.clear()
            await self.changed.wait()
        return self.heard

    def _hear(self, message: Said) -> None:
        self.heard.append(message)
        self.changed.set()

    def _end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.has_ended.set()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[End, End]]:
    left, right = (End(sock) for sock in socket.socketpair())
    async with asyncio.timeout(60):
        await left.open()
        await right.open()
        yield left, right
        await left.close()
        await right.close()
    assert [len(end.ends) for end in (left, right)] == [1, 1]


@asynccontextmanager
async def raw() -> AsyncIterator[tuple[End, socket.socket]]:
    """A link, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    end = End(ours)
    with theirs:
        theirs.setblocking(False)
        async with asyncio.timeout(60):
            await end.open()
            yield end, theirs
            await end.close()


async def frames_of(sock: socket.socket, num_messages: int) -> list[list[Said]]:
    """What is read of so many messages, frame by frame."""
    loop = asyncio.get_running_loop()
    splitter, frames = FrameSplitter(), list[list[Said]]()
    while sum(len(frame) for frame in frames) < num_messages:
        piece = await loop.sock_recv(sock, 1 << 20)
        assert piece, "the link ended"
        frames += [msgspec.msgpack.decode(data, type=list[Said]) for data in splitter.feed(piece)]
    return frames


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_message_larger_than_any_buffer_arrives_both_ways_at_once() -> None:
    async with linked() as ends:
        for end, byte in zip(ends, (b"a", b"b"), strict=True):
            end.link.inbox.send(Said(1, byte * LARGER_THAN_ANY_BUFFER))
            end.link.inbox.send(Said(2))
        for end, byte in zip(ends, (b"b", b"a"), strict=True):
            heard = await end.until_heard(2)
            assert heard == [Said(1, byte * LARGER_THAN_ANY_BUFFER), Said(2)]


async def test_a_slow_reader_blocks_nobody_and_loses_nothing() -> None:
    num_messages = 20 * MAX_IN_FRAME
    async with raw() as (end, sock):
        inbox = end.link.inbox
        for number in range(num_messages):
            inbox.send(Said(number, b"x" * 4096))
        await turns(50)  # the link has written what it could
        inbox.send(Said(num_messages))
        await turns(50)
        assert len(inbox) == 1, "what comes after waits where it is seen, not in the socket"
        frames = await frames_of(sock, num_messages + 1)
        numbers = [message.number for frame in frames for message in frame]
        assert numbers == list(range(num_messages + 1))
        assert max(len(frame) for frame in frames) == MAX_IN_FRAME


async def test_a_close_in_the_middle_of_many_messages_loses_none() -> None:
    num_messages = 20_000
    async with linked() as (left, right):
        for number in range(num_messages):
            left.link.inbox.send(Said(number, b"x" * 100))
        await turns(2)  # the socket is full, and most of them wait behind it
        assert 0 < left.link.backlog() < num_messages
        await left.close()
        await right.has_ended.wait()
        assert [message.number for message in right.heard] == list(range(num_messages))


async def test_a_message_that_cannot_be_encoded_is_dropped_alone_and_reported() -> None:
    async with linked() as (left, right):
        bad = Said(1, "\ud800")  # type: ignore[arg-type]  # what no validation has seen
        for message in (Said(0), bad, Said(2)):
            left.link.inbox.send(message)
        assert [message.number for message in await right.until_heard(2)] == [0, 2]
        assert left.unsendable == [bad]


async def test_a_reader_that_never_reads_does_not_hold_up_the_close() -> None:
    async with raw() as (end, _):
        end.link.write(Said(1, b"x" * LARGER_THAN_ANY_BUFFER))
        await end.link.stop()
        await end.link.close(timeout_s=0.01)
        await end.has_ended.wait()


async def test_half_a_frame_at_the_end_is_not_delivered() -> None:
    async with raw() as (end, sock):
        whole = framed(msgspec.msgpack.encode([Said(1)]))
        sock.send(whole + whole[:-1])
        sock.close()
        await end.has_ended.wait()
        assert end.heard == [Said(1)]
        assert end.ends == [None]
        end.link.inbox.send(Said(2))  # goes nowhere, and hurts nobody


async def test_bytes_that_are_no_message_end_the_link_with_an_error() -> None:
    async with raw() as (end, sock):
        sock.send(framed(b"\xc1"))
        await end.has_ended.wait()
        (error,) = end.ends
        assert isinstance(error, msgspec.DecodeError)
