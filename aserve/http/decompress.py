"""Decompresses a request body with `Content-Encoding: gzip` or `deflate`, within bounds.

The output's size and its ratio to the input are checked while it grows. Without the ratio, a few
kilobytes could cause as much work as the largest body.
"""

from __future__ import annotations

import zlib

from aserve.http.errors import RequestFailed, refused

ENCODINGS = ("gzip", "deflate")
MAX_RATIO = 100  # ordinary text compresses 3 to 20 times
FREE_BYTES = 1 << 20  # output up to this size may have any ratio
MAX_MEMBERS = 16  # concatenated gzip streams in one body
SLICE_BYTES = 1 << 18

GZIP, ZLIB, RAW = 31, 15, -15  # values of zlib's `wbits`
ZLIB_METHOD = 8  # the low bits of a zlib stream's first byte; a raw deflate stream has others


def decompress(data: bytes, encoding: str, *, max_size: int) -> bytes:
    output = bytearray()
    for _ in range(MAX_MEMBERS):
        decoder = zlib.decompressobj(_format_of(data, encoding))
        data = _decompress_member(decoder, data, output, max_size)
        if not data:
            return bytes(output)
    raise refused(400, f"The request body has more than {MAX_MEMBERS} gzip members.")


def _decompress_member(
    decoder: zlib._Decompress, data: bytes, output: bytearray, max_size: int
) -> bytes:
    """Appends one member's text to `output`, and returns the bytes after the member."""
    num_given = len(output) // MAX_RATIO + len(data)
    while not decoder.eof:
        try:
            piece = decoder.decompress(data, SLICE_BYTES)
        except zlib.error:
            raise broken_body() from None
        data = decoder.unconsumed_tail
        if not piece and not data and not decoder.eof:
            raise broken_body()
        output += piece
        if len(output) > max_size:
            raise refused(
                413, f"The request body has more than {max_size} bytes when decompressed."
            )
        if len(output) > max(FREE_BYTES, MAX_RATIO * num_given):
            raise refused(
                413,
                f"The request body grows more than {MAX_RATIO} times when decompressed. "
                "Send it without Content-Encoding.",
            )
    return decoder.unused_data


def _format_of(data: bytes, encoding: str) -> int:
    """Returns zlib's `wbits`. `deflate` is the zlib format, but some clients send raw deflate."""
    if encoding == "gzip":
        return GZIP
    return ZLIB if data and data[0] & 0xF == ZLIB_METHOD else RAW


def broken_body() -> RequestFailed:
    return refused(400, "The request body ended early or does not match its Content-Encoding.")
