"""Asks for request bodies and reads them: with a deadline, within a bound of memory, and large
ones off the loop.

Compressed and large bodies are decompressed, checked and decoded by one thread in order of arrival,
so that at most one of them competes for the interpreter lock. `held_bytes` is written on the loop,
by the handlers that read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from aiohttp import hdrs, web

from aserve.errors import QueueFull
from aserve.http.decompress import ENCODINGS
from aserve.http.errors import refused
from aserve.http.json_bounds import MAX_VALUES
from aserve.http.peers import PEERS, RAW_BODY
from aserve.http.state import HttpContext

T = TypeVar("T")

INLINE_BYTES = 1 << 15  # up to this size decoding on the loop is faster than a thread switch
SMALL_BYTES = 1 << 16  # bodies up to this size are never refused for lack of memory
HELD_BODIES = 16  # the memory for bodies that are being read, in bodies of the largest size
MIN_BYTES_PER_S = 1 << 16  # slower clients miss the deadline
RETRY_AFTER_S = 1.0
CONTINUE = "100-continue"
EXPECTATION = web.RequestKey("expectation", str)  # a client of HTTP/1.1 waits for its answer


class Intake:
    def __init__(self, context: HttpContext) -> None:
        options = context.options
        self.max_size = options.max_body_size
        self.held_bytes = 0
        self._state = context.state
        self._timeout_s = options.body_timeout
        self._max_held = HELD_BODIES * options.max_body_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def max_values(self) -> int:
        """The limit on JSON values in a body. Token ids are values, so a prompt as long as the
        model's context must pass.
        """
        return MAX_VALUES + (self._state.max_model_len or 0)

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """Counts the memory of one body until it has been decoded."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            self.held_bytes -= held.size

    async def receive(self, request: web.Request, held: HeldBody) -> bytes:
        """Receives a body, still compressed. Each byte that arrives extends the deadline by
        1 / MIN_BYTES_PER_S.
        """
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        pieces = []
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                while piece := await _next_piece(request):
                    held.add(len(piece))
                    pieces.append(piece)
                    deadline.reschedule(start_s + self._timeout_s + held.size / MIN_BYTES_PER_S)
        except TimeoutError:
            raise refused(
                408,
                f"The request body did not arrive in time: {held.size} bytes in "
                f"{loop.time() - start_s:.0f} seconds. See --body-timeout.",
            ) from None
        data = b"".join(pieces)
        if request.app[PEERS].number:
            request[RAW_BODY] = data
        return data

    async def off_loop(self, work: Callable[[], T], *, size: int) -> T:
        """Runs `work` in the thread, in order of arrival, or here if `size` is small. It is skipped
        if the caller is cancelled before it begins.
        """
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def check_room(self, size: int) -> None:
        if size > self.max_size:
            raise refused(413, f"The request body has more than {self.max_size} bytes.")
        if size > SMALL_BYTES and self.held_bytes > self._max_held:
            raise QueueFull(
                f"Bodies of {self.held_bytes} bytes are being read already, more than "
                f"{self._max_held}. Try again later.",
                retry_after_s=RETRY_AFTER_S,
            )


async def _next_piece(request: web.Request) -> bytes:
    """NOTE: aiohttp raises a RuntimeError if the client has gone before the first read."""
    if request.transport is None:
        raise ConnectionResetError("the client closed the connection before its body was read")
    return await request.content.readany()


def check_size(request: web.Request, max_body_size: int) -> None:
    """Refuses a large body by its Content-Length. Intake counts bytes of a body without one, and
    the route that takes forms those of a form.
    """
    size = request.content_length or 0
    if size > max_body_size and request.content_type != "multipart/form-data":
        raise refused(413, f"The request body has {size} bytes, more than {max_body_size}.")


async def meet_expectation(request: web.Request) -> None:
    """Asks for the body of a client that waits with it. The request's head has been checked."""
    expectation = request.get(EXPECTATION)
    if expectation is None or request.match_info.http_exception is not None:
        return
    if expectation.lower() != CONTINUE:
        raise refused(417, f"The server meets no expectation but {CONTINUE}.")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer has not begun


class HeldBody:
    """The bytes of one body that count towards `held_bytes`."""

    def __init__(self, intake: Intake) -> None:
        self.size = 0
        self._intake = intake

    def add(self, num_bytes: int) -> None:
        self.size += num_bytes
        self._intake.held_bytes += num_bytes
        self._intake.check_room(self.size)


def encoding_of(request: web.Request) -> str | None:
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ENCODINGS:
        raise refused(415, f"Content-Encoding must be {' or '.join(ENCODINGS)}, if there is one.")
    return encoding


INTAKE = web.AppKey("intake", Intake)
