"""Frames: whole ones come out whole, however the stream is cut."""

from __future__ import annotations

import io

import msgspec
import pytest

from aserve.frames import FrameSplitter, framed, receive, send

FRAMES = [b"", b"a", b"bc" * 3, b"", b"x" * 300]
STREAM = b"".join(framed(frame) for frame in FRAMES)


class Said(msgspec.Struct, frozen=True):
    text: str


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, len(STREAM)])
def test_every_cut_of_a_stream_gives_the_same_frames(size: int) -> None:
    splitter = FrameSplitter()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [frame for piece in pieces for frame in splitter.feed(piece)] == FRAMES
    assert not splitter.is_within_frame


@pytest.mark.parametrize("missing", [1, 299, 300, 303])
def test_a_stream_that_ends_within_a_frame_gives_those_before_it(missing: int) -> None:
    splitter = FrameSplitter()
    assert splitter.feed(STREAM[:-missing]) == FRAMES[:-1]
    assert splitter.is_within_frame


def test_messages_are_received_as_they_were_sent_up_to_the_end() -> None:
    stream = io.BytesIO()
    for text in ("one", "two"):
        send(stream, Said(text))
    whole = stream.getvalue()
    for end in (whole, whole + b"\1\0", whole + framed(b"half")[:-1]):
        stream = io.BytesIO(end)
        received = [receive(stream, Said) for _ in range(3)]
        assert received == [Said("one"), Said("two"), None]
