"""Decompresses a request body with `Content-Encoding: gzip` or `deflate`, within bounds.

The bounds are checked while the output grows: its size, and how many times larger than its input it
gets. A few kilobytes can otherwise ask for as much work as the largest body.
"""

from __future__ import annotations

import zlib

from aserve.http.errors import refused

ENCODINGS = ("gzip", "deflate")
MAX_RATIO = 100  # text compresses 3 to 20 times
FREE_BYTES = 1 << 20  # output for which no ratio is asked
MAX_MEMBERS = 16  # gzip files in one body
SLICE_BYTES = 1 << 18

GZIP, ZLIB, RAW = 31, 15, -15  # zlib's names for its formats (`wbits`)
ZLIB_METHOD = 8  # in the first byte, by which raw deflate streams differ


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
    """Appends to `output`; what stands behind the member is returned."""
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
                413, f"The request body has more than {max_size} bytes when it is decompressed."
            )
        if len(output) > max(FREE_BYTES, MAX_RATIO * num_given):
            raise refused(
                413,
                f"The request body gets more than {MAX_RATIO} times larger when it is "
                "decompressed. Send it without Content-Encoding.",
            )
    return decoder.unused_data


def _format_of(data: bytes, encoding: str) -> int:
    """`deflate` means the zlib format, but some clients send the raw stream."""
    if encoding == "gzip":
        return GZIP
    return ZLIB if data and data[0] & 0xF == ZLIB_METHOD else RAW


def broken_body() -> Exception:
    return refused(400, "The request body ended early or is not encoded as it says.")
