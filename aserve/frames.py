"""Frames for messages on a pipe or socket: a length (4 bytes, little endian), then msgpack."""

from __future__ import annotations

import struct
from typing import IO, TypeVar

import msgspec

T = TypeVar("T")

LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def send(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Writes a message; blocks while the stream is full."""
    stream.write(framed(msgspec.msgpack.encode(message)))
    stream.flush()


def receive(stream: IO[bytes], kind: type[T]) -> T | None:
    """Blocks for a message. Returns None at the end of the stream, also within a message."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return msgspec.msgpack.decode(data, type=kind) if len(data) == length else None


class FrameSplitter:
    """Splits a stream that arrives in pieces of any size into frames."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def is_within_frame(self) -> bool:
        return bool(self._rest)

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the frames that end in this piece."""
        rest = self._rest
        rest += piece
        frames: list[bytes] = []
        start = 0
        while start + LENGTH.size <= len(rest):
            (length,) = LENGTH.unpack_from(rest, start)
            end = start + LENGTH.size + length
            if end > len(rest):
                break
            frames.append(bytes(rest[start + LENGTH.size : end]))
            start = end
        del rest[:start]
        return frames
