"""Bounds on the shape of a JSON body, checked before it is decoded.

A decoder makes one object per value, and holds the interpreter lock until it is done: 5 million
`[]` take seconds, during which no other thread of the process runs. This scan makes no objects. It
counts brackets, commas and colons outside strings, slice by slice, so it releases the lock many
times per body, and it stops at the first bound that is exceeded.

PERF: 100 MB/s or more on a slow core, 2 ms per slice. Small bodies with few brackets and commas are
not scanned. Decoding a body that is just within all bounds takes 30 ms of CPU.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from aserve.errors import InvalidRequest

Bytes: TypeAlias = NDArray[np.uint8]

MAX_DEPTH = 128  # levels of nested arrays and objects
MAX_FIELDS = 256  # members of the outermost object
MAX_CONTAINERS = 32_768  # arrays and objects; decoding takes 0.3 to 1.3 us for each
MAX_MEMBERS = 65_536  # members of all objects; 0.3 us each
MAX_VALUES = 262_144  # values of all kinds; 0.07 us each
# Backslashes in strings; 7 ns each, during which no other thread runs. A body of the default
# maximum size that has nothing else has 1.4 million \\u escapes.
MAX_ESCAPES = 1_500_000
MAX_EXPONENTS = 1_024  # numbers like 1e300; 17 us each if the exponent is large

SLICE_BYTES = 1 << 18
BACKSLASHES = re.compile(rb"\\*")
COUNTED = b'[]{},:"eEtf'
REST = bytes(set(range(256)) - set(COUNTED))


def check_json_bounds(data: bytes, *, max_values: int = MAX_VALUES) -> None:
    """Raises InvalidRequest if `data` exceeds a bound. Invalid JSON is counted up to its first
    error as the decoder would see it.
    """
    num_open = data.count(b"[") + data.count(b"{")
    num_marks = num_open + data.count(b",") + data.count(b":")
    if num_open <= MAX_DEPTH and num_marks <= MAX_FIELDS and len(data) <= SLICE_BYTES:
        return
    scan = _Scan(max_values)
    start = 0
    while start < len(data):
        end = _slice_end(data, start)
        scan.add(data[start:end])
        start = end


def _slice_end(data: bytes, start: int) -> int:
    """Returns the end of the slice. It never follows a backslash, so no escape is split."""
    end = min(start + SLICE_BYTES, len(data))
    if data[end - 1 : end] == b"\\":
        run = BACKSLASHES.match(data, end)
        end = min((run.end() if run is not None else end) + 1, len(data))
    return end


class _Scan:
    """The counts of all slices so far, written by `add` alone."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._is_in_string = False
        self._depth = 0
        self._num_containers = 0
        self._num_members = 0
        self._num_values = 0
        self._num_escapes = 0
        self._num_exponents = 0
        self._num_fields = 1

    def add(self, piece: bytes) -> None:
        # WHY: pairs of backslashes are removed first, from the left, so that each one that remains
        # escapes the character after it.
        halved = piece.replace(b"\\\\", b"")
        plain = halved.replace(b'\\"', b"")
        self._num_escapes += (len(piece) - len(halved)) // 2 + halved.count(b"\\")
        _check(self._num_escapes, MAX_ESCAPES, "escapes in strings")
        outside = self._outside_strings(np.frombuffer(plain.translate(None, REST), np.uint8))
        if len(outside):
            self._count(outside)
            self._measure_depth(outside)

    def _outside_strings(self, data: Bytes) -> Bytes:
        is_inside = np.logical_xor.accumulate(data == ord('"'))
        if self._is_in_string:
            is_inside = ~is_inside
        if len(data):
            self._is_in_string = bool(is_inside[-1])
        return np.compress(~is_inside, data)

    def _count(self, outside: Bytes) -> None:
        def number(marks: bytes) -> int:
            return sum(int(np.count_nonzero(outside == mark)) for mark in marks)

        containers = number(b"[{")
        self._num_containers += containers
        self._num_members += number(b":")
        self._num_values += containers + number(b",")
        # `true` and `false` have an e, too.
        self._num_exponents += number(b"eE") - number(b"tf")
        _check(self._num_containers, MAX_CONTAINERS, "arrays and objects")
        _check(self._num_members, MAX_MEMBERS, "members of objects")
        _check(self._num_values, self._max_values, "values")
        _check(self._num_exponents, MAX_EXPONENTS, "numbers with exponents")

    def _measure_depth(self, outside: Bytes) -> None:
        opens = (outside == ord("[")) | (outside == ord("{"))
        closes = (outside == ord("]")) | (outside == ord("}"))
        steps = opens.view(np.int8) - closes.view(np.int8)
        depths = self._depth + np.cumsum(steps, dtype=np.int64)
        _check(int(depths.max()), MAX_DEPTH, "levels of nested arrays and objects")
        self._depth = int(depths[-1])
        self._num_fields += int(np.count_nonzero((outside == ord(",")) & (depths == 1)))
        _check(self._num_fields, MAX_FIELDS, "fields")


def _check(count: int, limit: int, what: str) -> None:
    """Raises above the limit. The message has no total, because the scan ends here."""
    if count > limit:
        raise InvalidRequest(
            f"The body has more than {limit} {what}. Send less in one request.",
            code="body_too_complex",
        )
