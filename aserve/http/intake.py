"""Reads request bodies: with a deadline, within a bound of memory, and large ones off the loop.

A body is received as it was sent. Compressed and large bodies are then decompressed, checked and
decoded by one thread, in order of arrival, so that at most one of them takes the interpreter lock
at a time. `held_bytes` is written on the loop, by the handlers that read.
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
from aserve.http.state import HttpContext

T = TypeVar("T")

INLINE_BYTES = 1 << 15  # up to which decoding takes the loop less time than asking a thread
SMALL_BYTES = 1 << 16  # bodies up to this size are never refused for the memory of others
HELD_BODIES = 16  # of the largest size: the memory for all bodies that are being read
MIN_BYTES_PER_S = 1 << 16  # slower clients run into the deadline
RETRY_AFTER_S = 1.0


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
        """Token ids are values, so a prompt as long as the model's context must be allowed."""
        return MAX_VALUES + (self._state.max_model_len or 0)

    @contextmanager
    def holding(self) -> Iterator[Held]:
        """The memory of one body, until its record has been made."""
        held = Held(self)
        try:
            yield held
        finally:
            self.held_bytes -= held.size

    async def receive(self, request: web.Request, held: Held) -> bytes:
        """The body as it was sent. The deadline moves on with what arrives, but only as far as a
        client gets that sends MIN_BYTES_PER_S.
        """
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        pieces = []
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                while piece := await request.content.readany():
                    held.add(len(piece))
                    pieces.append(piece)
                    deadline.reschedule(start_s + self._timeout_s + held.size / MIN_BYTES_PER_S)
        except TimeoutError:
            raise refused(
                408,
                f"The request body did not arrive in time: {held.size} bytes in "
                f"{loop.time() - start_s:.0f} seconds. See --body-timeout.",
            ) from None
        return b"".join(pieces)

    async def off_loop(self, work: Callable[[], T], *, size: int) -> T:
        """What `work` returns or raises. It waits its turn in the thread, and is never begun for a
        client that has gone away.
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


class Held:
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
