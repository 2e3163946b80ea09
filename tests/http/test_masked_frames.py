"""Frames that a client does not mask end the websocket with 1002, wherever the bytes are cut."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.http.masked_frames import PROTOCOL_ERROR, MaskedFrames
from tests.fakes.echo_engine import EchoEngine

MASK = b"\1\2\3\4"


def frame(payload: bytes, *, mask: bytes | None = MASK, opcode: int = 1) -> bytes:
    size, bit = len(payload), 0x80 if mask is not None else 0
    if size < 126:
        head = struct.pack("!BB", 0x80 | opcode, bit | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x80 | opcode, bit | 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, bit | 127, size)
    if mask is None:
        return head + payload
    masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
    return head + mask + masked


class Kept:
    def __init__(self) -> None:
        self.data = b""
        self.is_at_eof = False

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        self.is_at_eof = True


def fed(pieces: list[bytes]) -> bytes:
    reader = Kept()
    frames = MaskedFrames(reader)
    for piece in pieces:
        frames.feed_data(piece)
    frames.feed_eof()
    assert reader.is_at_eof
    return reader.data


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


SIZES = st.sampled_from([0, 1, 2, 125, 126, 127, 300, 65_535, 65_536, 66_000])


@given(sizes=st.lists(SIZES, max_size=4), places=st.lists(st.integers(0, 200_000), max_size=12))
def test_masked_frames_pass_unchanged_however_they_are_cut(
    sizes: list[int], places: list[int]
) -> None:
    data = b"".join(frame(b"\x81\x05" * (size // 2) + b"x" * (size % 2)) for size in sizes)
    assert fed(cut(data, places)) == data


@given(
    sizes=st.lists(SIZES, max_size=3),
    last=SIZES,
    places=st.lists(st.integers(0, 200_000), max_size=12),
)
def test_from_the_first_unmasked_frame_on_the_reader_gets_an_error_alone(
    sizes: list[int], last: int, places: list[int]
) -> None:
    right = b"".join(frame(b"a" * size) for size in sizes)
    wrong = frame(b"b" * last, mask=None) + frame(b"c")
    assert fed(cut(right + wrong, places)) == right + PROTOCOL_ERROR


async def upgraded(echo: EchoEngine) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(echo.url.rpartition(":")[2]))
    key = base64.b64encode(os.urandom(16)).decode()
    head = (
        "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {key}\r\n\r\n"
    )
    writer.write(head.encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    assert b" 101 " in answer
    return reader, writer


@pytest.mark.parametrize("opcode", [1, 2, 8, 9, 10])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_an_unmasked_frame_closes_the_websocket_with_1002(
    echo: EchoEngine, opcode: int, is_cut: bool
) -> None:
    reader, writer = await upgraded(echo)
    payload = b"\x03\xe8" if opcode == 8 else b"{}"
    sent = frame(payload, mask=None, opcode=opcode)
    for piece in [sent[:1], sent[1:]] if is_cut else [sent]:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        assert await reader.readexactly(4) == b"\x88\x02" + struct.pack("!H", 1002)
    writer.close()


async def test_a_masked_frame_is_answered(echo: EchoEngine) -> None:
    reader, writer = await upgraded(echo)
    writer.write(frame(b'{"type": "nothing"}'))
    async with asyncio.timeout(10):
        head = await reader.readexactly(2)
    assert head[0] == 0x81
    writer.close()
