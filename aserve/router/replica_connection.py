"""One HTTP/1.1 connection to a replica, whose answers are passed on in the callback that gets them.

WHY: with aiohttp's client a request through the router costs half as much again, and a chunk of a
stream, which then wakes a task, twice as much (docs/performance.md). httptools parses, as it does
for uvicorn; it is the parser of Node.js.

All state is written on the loop: by the transport's callbacks, and by the one task that asks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import cast

from aiohttp import StreamReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict

MAX_HEAD_BYTES = 1 << 16
MAX_UNREAD_BYTES = 1 << 16  # of an answer; above it nothing is read from the replica
CLIENT_FAILED = (web.RequestPayloadError, HttpProcessingError, OSError)
ANY_BYTES = ("utf-8", "surrogateescape")  # how aiohttp decodes heads, so that all bytes pass


class AnswerBroken(ConnectionError):
    """The replica has closed the connection, or has sent what is no HTTP. `has_begun` says whether
    part of an answer had come.
    """

    def __init__(self, what: str, *, has_begun: bool) -> None:
        super().__init__(what)
        self.has_begun = has_begun


class ReplicaConnection(asyncio.Protocol):
    """Carries one request at a time. `is_idle` says whether it can carry another one. The task that
    sends a body which still arrives begins with `send`, and ends with `end` at the latest.
    """

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._upload: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.transport: asyncio.Transport

    @property
    def is_idle(self) -> bool:
        return self._answer is None and not self.transport.is_closing()

    @property
    def is_writable(self) -> bool:
        """Whether the replica reads what it is sent."""
        return self._writable.is_set()

    def send(self, head: bytes, body: bytes | StreamReader, *, timeout_s: float) -> Answer:
        """Sends a request, and begins to send a body that still arrives. `end` must follow."""
        assert self.is_idle
        answer = self._answer = Answer(self, timeout_s, has_body=not head.startswith(b"HEAD "))
        if isinstance(body, bytes):
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            answer.is_sending = True
            self._upload = asyncio.create_task(self._send_chunks(body, answer))
        return answer

    async def end(self) -> None:
        """Ends the exchange. The connection is closed unless the answer has come to its end."""
        try:
            if self._upload is not None:
                self._upload.cancel()
                await asyncio.wait([self._upload])
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            answer, self._answer, self._upload = self._answer, None, None
            if answer is None or not answer.end():
                self.close()

    def close(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nothing was asked
            self.close()
        else:
            self._answer.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        if self._answer is not None:
            self._answer.lose(exc)

    def pause_writing(self) -> None:
        self._writable.clear()
        if self._answer is not None:
            self._answer.heard()  # from now on it is the replica that is awaited

    def resume_writing(self) -> None:
        self._writable.set()
        if self._answer is not None:
            self._answer.heard()

    async def _send_chunks(self, body: StreamReader, answer: Answer) -> None:
        try:
            with contextlib.suppress(*CLIENT_FAILED):
                async for piece in body.iter_any():
                    await self._send_chunk(piece)
                await self._send_chunk(b"")  # the last one (RFC 9112, 7.1)
                answer.is_sending = False
                answer.heard()  # from now on it is the replica that is awaited
        finally:
            if answer.is_sending:
                answer.fail(web.RequestPayloadError("the request's body has ended too early"))

    async def _send_chunk(self, piece: bytes) -> None:
        await self._writable.wait()
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class Answer:
    """The answer to one request. `status`, `reason` and `headers` are set when `head` returns.
    `is_complete` says that its end has come, of which part may still be unread.

    Errors of all methods that wait: AnswerBroken, TimeoutError if the replica has sent nothing for
    `timeout_s` seconds, and RequestPayloadError if the client does not finish its request's body.
    """

    def __init__(self, connection: ReplicaConnection, timeout_s: float, *, has_body: bool) -> None:
        self.connection = connection
        self.status = 0
        self.reason = ""
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.is_complete = False
        self.is_sending = False  # the request's body is on its way
        self._transport = connection.transport
        self._timeout_s = timeout_s
        self._has_body = has_body  # False for HEAD, whatever the head says
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._pieces: list[bytes] = []  # of the body, which nobody has taken yet
        self._num_unread = 0
        self._has_begun = False
        self._num_head_bytes = 0  # or of trailers: since the last byte of the body
        self._has_head = False
        self._is_kept = False  # the connection can carry another request
        self._is_paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._write: Callable[[bytes], bool] | None = None
        self._heard_s = self._loop.time()
        self._silence = self._loop.call_later(timeout_s, self._check_silence)

    async def head(self) -> None:
        while not self._has_head:
            await self._wait()

    async def read_some(self) -> bytes:
        """Returns the part of the body that is there, or waits for one. The end is empty."""
        while not self._pieces and not self.is_complete:
            await self._wait()
        return self._take()

    async def read(self, limit: int | None = None) -> bytes:
        """Returns the whole body, or its beginning when that has at least `limit` bytes."""
        whole = bytearray()
        while (limit is None or len(whole) < limit) and (piece := await self.read_some()):
            whole += piece
        return bytes(whole[:limit])

    async def pipe(self, write: Callable[[bytes], bool]) -> bool:
        """Gives `write` each piece of the body as it arrives. Returns False as soon as `write` does
        so, which means that the sink is full, and True at the end of the body.
        """
        self._resume()
        if self._pieces and not write(self._take()):
            return False
        self._write = write
        try:
            while self._write is not None:
                if self.is_complete:
                    return True
                await self._wait()
            return self.is_complete
        finally:
            self._write = None

    def feed(self, data: bytes) -> None:
        self.heard()
        self._has_begun = True
        self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._is_kept = False
            if not self.is_complete:
                self.fail(self._broken(f"has sent what is no HTTP ({type(error).__name__})"))
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.is_complete:
            self.fail(self._broken(f"has sent headers of more than {MAX_HEAD_BYTES} bytes"))
        self._arrived()

    def lose(self, error: Exception | None) -> None:
        """The connection is closed. A body without a length ends with it."""
        if self._has_head and error is None and self._ends_by_close():
            self.is_complete = True
            self._wake()
        elif not self.is_complete:
            self.fail(self._broken("has closed the connection"))

    def heard(self) -> None:
        """The replica is not silent."""
        self._heard_s = self._loop.time()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._is_kept = False
        self._wake()

    def end(self) -> bool:
        """Returns whether the connection can carry another request."""
        self._silence.cancel()
        self._resume()
        del self._parser  # which refers to this answer
        return self.is_complete and self._is_kept and not self.is_sending

    def on_message_begin(self) -> None:
        if self.is_complete:  # a second answer to one request
            self._is_kept = False

    def on_status(self, status: bytes) -> None:
        if not self._has_head:
            self.reason += status.decode(*ANY_BYTES)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # trailers do not pass
            self.headers.add(name.decode(*ANY_BYTES), value.decode(*ANY_BYTES))

    def on_headers_complete(self) -> None:
        if self.is_complete:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:  # informational, before the answer (RFC 9110, 15.2)
            self.status, self.reason = 0, ""
            self.headers.clear()
            return
        self._has_head = True
        self.is_complete = not self._has_body
        self._is_kept = self._parser.should_keep_alive() and self._has_body

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        if not self.is_complete:
            self._pieces.append(body)
            self._num_unread += len(body)

    def on_message_complete(self) -> None:
        self.is_complete = self._has_head

    async def _wait(self) -> None:
        """Waits until something has happened. Raises the error that has ended the answer."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._pieces:
            raise self._error

    def _arrived(self) -> None:
        if self._write is None:
            if self._num_unread > MAX_UNREAD_BYTES:
                self._pause()
        elif self._pieces and not self._write(self._take()):
            self._write = None
            self._pause()
        elif not self.is_complete:
            return
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> bytes:
        pieces, self._pieces, self._num_unread = self._pieces, [], 0
        self._resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _pause(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.heard()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _check_silence(self) -> None:
        is_client_awaited = self.is_sending and self.connection.is_writable
        if self._is_paused or is_client_awaited:
            self.heard()
        left_s = self._heard_s + self._timeout_s - self._loop.time()
        if left_s <= 0:
            self.fail(TimeoutError(f"the replica has sent nothing for {self._timeout_s:g} seconds"))
        else:
            self._silence = self._loop.call_later(left_s, self._check_silence)

    def _ends_by_close(self) -> bool:
        coding = self.headers.get(hdrs.TRANSFER_ENCODING, "").lower()
        return "chunked" not in coding and hdrs.CONTENT_LENGTH not in self.headers

    def _broken(self, what: str) -> AnswerBroken:
        return AnswerBroken(f"the replica {what}", has_begun=self._has_begun)
