"""Checks that clients mask their websocket frames (RFC 6455, 5.1), because aiohttp does not.

Masking keeps a web page from sending bytes of its choice that a proxy would take for HTTP. After an
unmasked frame the server must close with status 1002.
"""

from __future__ import annotations

from typing import Protocol

MASK_BIT = 0x80
LENGTH_BITS = 0x7F
LENGTH_BYTES = {126: 2, 127: 8}
MASK_BYTES = 4
MAX_HEADER = 2 + 8 + MASK_BYTES
# A frame with a reserved opcode: aiohttp's reader closes with 1002 when it gets one.
PROTOCOL_ERROR = bytes([0x83, MASK_BIT, 0, 0, 0, 0])


class FrameReader(Protocol):
    def feed_data(self, data: bytes) -> tuple[bool, bytes]: ...

    def feed_eof(self) -> None: ...


class MaskedFrames:
    """A frame reader that checks the headers of frames and passes all bytes on to `reader`."""

    def __init__(self, reader: FrameReader) -> None:
        self._reader = reader
        self._held = b""  # a frame's first byte, until the byte with its mask bit arrives
        self._header = b""  # the part of a masked frame's header that has arrived
        self._num_left = 0  # bytes of the frame's payload that are still missing
        self._is_broken = False

    def feed_eof(self) -> None:
        self._reader.feed_eof()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        if self._is_broken:
            return True, b""
        data, self._held = self._held + data, b""
        place = 0
        while place < len(data):
            if self._num_left:
                step = min(self._num_left, len(data) - place)
                self._num_left -= step
                place += step
                continue
            header = self._header + data[place : place + MAX_HEADER - len(self._header)]
            if len(header) < 2:
                data, self._held = data[:place], header
                break
            if not header[1] & MASK_BIT:
                self._is_broken = True
                return self._reader.feed_data(data[:place] + PROTOCOL_ERROR)
            place += self._read_header(header)
        return self._reader.feed_data(data)

    def _read_header(self, header: bytes) -> int:
        """Reads a header, which may be incomplete or followed by payload, and returns how many
        bytes of it are new.
        """
        num_length_bytes = LENGTH_BYTES.get(header[1] & LENGTH_BITS, 0)
        size = 2 + num_length_bytes + MASK_BYTES
        num_known = len(self._header)
        if len(header) < size:
            self._header = header
            return len(header) - num_known
        self._header = b""
        length = header[2 : 2 + num_length_bytes] or bytes([header[1] & LENGTH_BITS])
        self._num_left = int.from_bytes(length, "big")
        return size - num_known
