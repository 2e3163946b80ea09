"""Messages as frames of a stream: a length (4 bytes, little endian), then msgpack.

Must not know what messages mean, nor what the stream is: a file, a pipe or a socket.
"""

from __future__ import annotations

import struct
from typing import IO, TypeVar

import msgspec

T = TypeVar("T")

LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def send(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Blocks while the stream is full."""
    stream.write(framed(msgspec.msgpack.encode(message)))
    stream.flush()


def receive(stream: IO[bytes], kind: type[T]) -> T | None:
    """Blocks until it is there; None at the end of the stream, wherever it comes."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return msgspec.msgpack.decode(data, type=kind) if len(data) == length else None


class FrameSplitter:
    """Cuts what comes in pieces of any size into whole frames."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def is_within_frame(self) -> bool:
        return bool(self._rest)

    def feed(self, piece: bytes) -> list[bytes]:
        """The frames that end in this piece."""
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
