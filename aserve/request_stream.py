"""The stream of a call's output chunks, and the gateway that routes chunks to open streams.

The HTTP server and the embeddable engine use it, on the loop's thread. Only `Gateway` writes which
streams are open. Unread chunks of a child coalesce. If the reader waits for a client that may not
read, their bytes are bounded: above the bound the requests are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from aserve.amendments import Amendments, amended
from aserve.channel import yield_to_loop
from aserve.errors import ErrorInfo, ExpectedWait, InvalidRequest, QueueFull
from aserve.messages.changes import Amend
from aserve.messages.output import OutputChunk, failed_chunk
from aserve.messages.requests import Cancel, GenerateRequest
from aserve.unread import MAX_UNREAD_BYTES, IdleAlarm, Unread, UnreadAnswer

Offer: TypeAlias = Callable[[OutputChunk], bool]


@dataclass(slots=True)
class _Opened:
    """`request` is kept as it is after changes. `outputs` are the tokens that each child has sent,
    int32.
    """

    request_stream: RequestStream
    request: GenerateRequest
    outputs: dict[int, bytearray] = field(default_factory=dict)


class Gateway:
    """Submits requests, and delivers each output chunk to its stream. There is one per frontend."""

    def __init__(
        self,
        *,
        submit: Callable[[GenerateRequest], None],
        cancel: Callable[[Cancel | Amend], None],
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self.capacity: Capacity | None = None  # set once the engine has started
        self._num_sequences = 0  # of the open requests
        self._submit = submit
        self._cancel = cancel
        self._max_unread_bytes = max_unread_bytes
        self._open: dict[str, _Opened] = {}
        self.amendments = Amendments(send=cancel, on_change=self._note_change)
        self._is_drained = asyncio.Event()
        self._is_drained.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def lora_slots(self) -> set[int]:
        """Returns the adapter slots of the open requests."""
        return {request.lora_slot for request in self.requests.values()}

    def open(self, *requests: GenerateRequest) -> RequestStream:
        """Submits the requests of one call and returns the stream of their chunks. A reader that
        stops early must cancel it.
        """
        if self.capacity is not None:
            self.capacity.check(
                sum(request.sampling.n for request in requests), num_open=self._num_sequences
            )
        request_stream = RequestStream(
            [request.request_id for request in requests],
            leave=self._leave,
            max_unread_bytes=self._max_unread_bytes,
        )
        for request in requests:
            assert request.request_id not in self._open, "request ids are made by the server"
            self._open[request.request_id] = _Opened(request_stream, request)
            self._num_sequences += request.sampling.n
        self._is_drained.clear()
        with contextlib.ExitStack() as undo:
            undo.callback(request_stream.cancel)
            for request in requests:
                self._submit(request)
            undo.pop_all()
        return request_stream

    def deliver(self, chunk: OutputChunk) -> None:
        """Delivers a chunk. A chunk of a request that is no longer open is dropped."""
        opened = self._open.get(chunk.request_id)
        if opened is None:
            return
        opened.outputs.setdefault(chunk.child, bytearray()).extend(chunk.token_ids)
        if chunk.is_last:
            self._close(chunk.request_id)
        opened.request_stream.put(chunk)

    def end_all(self, error: ErrorInfo) -> None:
        """Ends every open request with this error."""
        for request_id in list(self._open):
            self.deliver(failed_chunk(request_id, error))

    @property
    def requests(self) -> dict[str, GenerateRequest]:
        """The open requests by their ids, as they are after changes."""
        return {request_id: opened.request for request_id, opened in self._open.items()}

    def outputs_of(self, request_id: str, child: int) -> bytes:
        """Returns the tokens that a child of an open request has sent, int32."""
        return bytes(self._open[request_id].outputs.get(child, b""))

    def abort(self, request_id: str, error: ErrorInfo) -> None:
        """Ends an open request with this error, here at once and then in the engine."""
        self.deliver(failed_chunk(request_id, error))
        self._cancel(Cancel(request_id, None, 0, "cancelled"))

    async def drained(self) -> None:
        """Waits until no request is open; the caller sets the deadline."""
        await self._is_drained.wait()

    def _leave(self, request_id: str) -> None:
        if request_id in self._open:
            self._close(request_id)
            self._cancel(Cancel(request_id, None, 0, "cancelled"))

    def _note_change(self, change: Amend) -> None:
        opened = self._open.get(change.request_id)
        if opened is not None:
            opened.request = amended(opened.request, change)

    def _close(self, request_id: str) -> None:
        self._num_sequences -= self._open.pop(request_id).request.sampling.n
        if not self._open:
            self._is_drained.set()


@dataclass(frozen=True, slots=True)
class Capacity:
    """The numbers of sequences that may run and wait.

    WHY: the engine itself refuses requests beyond its queue, fairly among clients. An engine that
    has stopped answering refuses nothing, so the frontend has a slightly higher limit of its own.
    """

    max_rows: int
    max_waiting: int

    def check(self, num_sequences: int, *, num_open: int) -> None:
        """Raises InvalidRequest for a call that can never be admitted, else QueueFull."""
        most = self.max_rows + self.max_waiting
        if num_sequences > most:
            raise InvalidRequest(
                f"This call makes {num_sequences} sequences (prompts times n), but the server runs "
                f"at most {self.max_rows} at once and lets {self.max_waiting} wait, so it could "
                "never be admitted. Send fewer prompts in a call, or a smaller n.",
                param="n",
                code="too_many_sequences",
            )
        if num_open + num_sequences > most + self.max_waiting // 4:
            raise QueueFull(
                f"The server holds {num_open} sequences, of which at most {self.max_rows} run at "
                f"once, and this call adds {num_sequences}. Try again later.",
                retry_after_s=1.0,
                wait=ExpectedWait(num_open - self.max_rows + 1, None),
            )


class RequestStream:
    """The output chunks of one call, for one reader."""

    __slots__ = (
        *("_alarm", "_is_unread", "_leave", "_max_unread_bytes", "_next", "_num_open", "_offer"),
        *("_on_unread", "_pending", "_request_ids", "_waiter"),
    )

    def __init__(
        self,
        request_ids: list[str],
        *,
        leave: Callable[[str], None],
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        """`leave` ends a request, unless it has ended."""
        self._request_ids = request_ids
        self._num_open = len(request_ids)
        self._leave = leave
        self._max_unread_bytes = max_unread_bytes
        self._next: OutputChunk | None = None  # came while the reader waited, before all pending
        self._pending: Unread | None = None  # made when a chunk comes while the reader is busy
        self._waiter: asyncio.Future[None] | None = None  # of a reader that waits
        self._offer: Offer | None = None
        self._alarm: IdleAlarm | None = None
        self._is_unread = False
        self._on_unread: Callable[[], None] | None = None

    @property
    def unread_bytes(self) -> int:
        return 0 if self._pending is None else self._pending.size_bytes

    def bound_unread(self, on_unread: Callable[[], None]) -> None:
        """Bounds the unread bytes from now on. Above the bound the requests are cancelled,
        `on_unread` is called, and the next batch raises UnreadAnswer.
        """
        self._on_unread = on_unread

    def put(self, chunk: OutputChunk) -> None:
        """Adds a chunk. Only the gateway calls it."""
        offer, waiter = self._offer, self._waiter
        if waiter is not None and not waiter.done() and not self._pending:
            if offer is not None and not chunk.is_last and offer(chunk):
                if self._alarm is not None:
                    self._alarm.reset()
                return
            # PERF: the reader takes it in this iteration of the loop, so it needs no queue.
            self._next = chunk
            self._num_open -= chunk.is_last
            waiter.set_result(None)
            return
        if self._pending is None:
            self._pending = Unread()
        if self._next is not None:
            self._pending.put(self._next)
            self._next = None
        self._pending.put(chunk)
        self._num_open -= chunk.is_last
        if self._on_unread is not None and self.unread_bytes > self._max_unread_bytes:
            self._is_unread = True
            self.cancel()
            self._on_unread()
        self._wake()

    def cancel(self) -> None:
        """Cancels the requests that still run and drops the unread chunks."""
        self._num_open, self._next, self._pending = 0, None, None
        for request_id in self._request_ids:
            self._leave(request_id)
        self._wake()

    async def batches(
        self, *, idle_s: float | None = None, offer: Offer | None = None
    ) -> AsyncIterator[list[OutputChunk]]:
        """Yields the chunks that have come since the last batch, one per child, or an empty batch
        after each `idle_s` without a chunk; then `cancel` must follow. Much output is yielded in
        several batches, one per loop iteration.

        The last chunk of a request has `is_last`; the iteration ends after that of every request.
        A chunk that comes while the reader waits is first given to `offer`, unless it is the last
        one of its request. If `offer` returns True, it is not yielded. PERF: waking a handler takes
        longer than writing a token.
        """
        self._offer = offer
        alarm = self._alarm = None if idle_s is None else IdleAlarm(idle_s, self._wake)
        try:
            while self._next or self._pending or self._num_open:
                if not (self._next or self._pending):
                    await self._arrival()  # PERF: a future, not a coroutine, which has 272 bytes
                batch = self._take()
                if batch or self._num_open:
                    yield batch
                if self._pending:
                    await yield_to_loop()
        finally:
            if alarm is not None:
                alarm.stop()
            self._alarm = self._offer = None  # they name this stream
        if self._is_unread:
            raise UnreadAnswer(
                f"the client left more than {self._max_unread_bytes} bytes of the answer unread, "
                "so its requests were cancelled; read faster or ask for less"
            )

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        async for chunks in self.batches():
            for chunk in chunks:
                yield chunk

    def _take(self) -> list[OutputChunk]:
        batch, self._next = [self._next] if self._next else [], None
        return batch or (self._pending.take() if self._pending else [])

    def _arrival(self) -> asyncio.Future[None]:
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        if self._alarm is not None:
            self._alarm.reset()
        return waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
