"""Frames that a client does not mask end the websocket with 1002, wherever the bytes are cut."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.http.masked_frames import PROTOCOL_ERROR, MaskedFrames
from tests.fakes.echo_engine import EchoEngine
from tests.http.unread_client import UnreadClient

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


@pytest.fixture
async def peer(echo: EchoEngine) -> AsyncIterator[UnreadClient]:
    async with UnreadClient(echo.url) as client, asyncio.timeout(60):
        await client.open_websocket("/v1/responses")
        yield client


@pytest.mark.parametrize("opcode", [1, 2, 8, 9, 10])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_an_unmasked_frame_closes_the_websocket_with_1002(
    peer: UnreadClient, opcode: int, is_cut: bool
) -> None:
    payload = b"\x03\xe8" if opcode == 8 else b"{}"
    sent = frame(payload, mask=None, opcode=opcode)
    for piece in [sent[:1], sent[1:]] if is_cut else [sent]:
        await peer.send(piece)
        await asyncio.sleep(0.01)
    assert await peer.read_all() == b"\x88\x02" + struct.pack("!H", 1002)
