"""Checks the input file of a batch, and finds its lines again."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from aserve.batches.records import BatchLine, LineError
from aserve.errors import AserveError

MAX_LINES = 50_000
MAX_ERRORS = 20


class LineAnswer(msgspec.Struct):
    """The answer to a line. One with a time is to be asked for again after it."""

    status: int
    body: bytes
    retry_after_s: float | None = None


class LineWork(Protocol):
    """The work that the HTTP server does for batches."""

    max_line: int  # bytes

    def parse(self, data: bytes) -> BatchLine:
        """Decodes a line. Raises AserveError if it is none."""

    def answer(self, line: BatchLine, request_id: str, caller: bytes) -> Awaitable[LineAnswer]:
        """Answers a line as its endpoint would, for the caller of the batch."""

    def num_rows(self) -> int:
        """Returns how many rows the engine has, 0 before it has started."""

    def num_open(self) -> int:
        """Returns how many requests are open, those of batches included."""


class InputLines:
    """The lines of a file that was checked. `num_lines` leaves out empty ones."""

    def __init__(self, path: Path, offsets: array[int]) -> None:
        self._path = path
        self._offsets = offsets

    @property
    def num_lines(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> BatchLine:
        with self._path.open("rb") as content:
            content.seek(self._offsets[index])
            return msgspec.json.decode(content.readline(), type=BatchLine)


def check_lines(path: Path, endpoint: str, work: LineWork) -> InputLines | list[LineError]:
    """Reads the whole file. Returns its lines, or what is wrong with the first bad ones."""
    errors: list[LineError] = []
    offsets = array("q")
    seen: set[str] = set()
    with path.open("rb") as content:
        for number, (offset, data) in enumerate(_lines_of(content, work.max_line), start=1):
            if not data.strip():
                continue
            offsets.append(offset)
            error = _error_of(data, endpoint, seen, work)
            if error is None and len(offsets) > MAX_LINES:
                error = LineError("too_many_lines", f"A batch has at most {MAX_LINES} lines.")
            if error is not None:
                error.line = number
                errors.append(error)
            if len(errors) == MAX_ERRORS or len(offsets) > MAX_LINES:
                return errors
    if not offsets:
        errors.append(LineError("empty_file", "The input file has no lines."))
    return errors or InputLines(path, offsets)


def _lines_of(content: BinaryIO, max_line: int) -> Iterator[tuple[int, bytes]]:
    """Yields each line with its offset. The rest of a line that is too long is passed over."""
    offset = 0
    while line := content.readline(max_line + 1):
        yield offset, line
        offset += len(line)
        while line and not line.endswith(b"\n"):
            line = content.readline(max_line + 1)
            offset += len(line)


def _error_of(data: bytes, endpoint: str, seen: set[str], work: LineWork) -> LineError | None:
    if len(data) > work.max_line:
        return LineError("line_too_long", f"The line has more than {work.max_line} bytes.")
    try:
        line = work.parse(data)
    except AserveError as error:
        return LineError("invalid_line", error.message, param=error.param)
    if line.method != "POST" or line.url != endpoint:
        found = f"{line.method[:10]} {line.url[:80]}"
        return LineError("invalid_url", f"Every line must be POST {endpoint}; this is {found}.")
    if line.custom_id in seen:
        what = f"The custom_id {line.custom_id[:80]!r} was used by an earlier line."
        return LineError("duplicate_custom_id", what, param="custom_id")
    seen.add(line.custom_id)
    return None
