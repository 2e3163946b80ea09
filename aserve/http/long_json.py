"""Encodes long JSON in pieces, so that no iteration of the loop encodes or copies much of it.

The long parts of a record are fields of type `JsonList` or `JsonEach`. The encoder writes a marker
for each of them, and `pieces_of` replaces the markers by the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

BLOCK_BYTES = 1 << 16  # asyncio's default high-water mark of a transport's buffer
# WHY: encoded JSON never contains this byte, because strings escape it.
MARK = b"\0"


class JsonList:
    """A list whose items are encoded as they are added. The JSON takes a sixth of the records'
    memory.
    """

    __slots__ = ("_parts",)

    def __init__(self, items: Sequence[object] = ()) -> None:
        self._parts: list[bytes] = []
        self.extend(items)

    def extend(self, items: Sequence[object]) -> None:
        if items:
            self._parts.append(msgspec.json.encode(items)[1:-1])

    def pieces(self) -> Iterator[bytes]:
        yield b"["
        for number, part in enumerate(self._parts):
            if number:
                yield b","
            yield part
        yield b"]"


class JsonEach:
    """A list whose items are made and encoded one by one while it is written."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Iterable[object]]) -> None:
        self._make = make

    def pieces(self) -> Iterator[bytes]:
        yield b"["
        for number, item in enumerate(self._make()):
            if number:
                yield b","
            yield from pieces_of(item)
        yield b"]"


Long: TypeAlias = JsonList | JsonEach


def pieces_of(record: object) -> Iterator[bytes]:
    """Yields the JSON of a record that may have `JsonList` and `JsonEach` fields."""
    longs: list[Long] = []

    def mark(value: object) -> msgspec.Raw:
        if not isinstance(value, JsonList | JsonEach):
            raise NotImplementedError(f"{type(value).__name__} cannot be encoded")
        longs.append(value)
        return msgspec.Raw(MARK)

    first, *others = msgspec.json.encode(record, enc_hook=mark).split(MARK)
    yield first
    for long, after in zip(longs, others, strict=True):
        yield from long.pieces()
        yield after


def blocks_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the same bytes in blocks of BLOCK_BYTES; the last one may be shorter."""
    block = bytearray()
    for piece in pieces:
        start = 0
        while len(piece) - start + len(block) >= BLOCK_BYTES:
            end = start + BLOCK_BYTES - len(block)
            block += memoryview(piece)[start:end]
            start = end
            yield bytes(block)
            block.clear()
        block += memoryview(piece)[start:]
    if block:
        yield bytes(block)
