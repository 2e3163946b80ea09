"""The running responses, and access to the ended ones, which are stored.

Only `Responses` writes which responses run. The client that created a response reads its events; a
response in the background is read by a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web

from aserve.errors import BugError, ErrorInfo, InvalidRequest, NotFound
from aserve.http.errors import RequestFailed
from aserve.http.responses.call import ResponseCall
from aserve.http.responses.conversation import Item
from aserve.http.responses.conversations import Conversations
from aserve.http.responses.event_maker import EventMaker
from aserve.http.responses.events import Event, frame_of
from aserve.http.responses.records import ResponseObject
from aserve.http.responses.store import ResponseKey, ResponseStore, StoredResponse
from aserve.http.state import HttpContext
from aserve.http.streams.resumable import StreamKey, Streams
from aserve.messages.output import OutputChunk
from aserve.request_stream import RequestStream


class LiveResponse:
    """A running response, from its first event to its last."""

    def __init__(
        self,
        call: ResponseCall,
        request_stream: RequestStream,
        *,
        on_end: Callable[[StoredResponse], None],
    ) -> None:
        self.error: ErrorInfo | None = None  # why it failed
        self._call = call
        self._request_stream = request_stream
        self._on_end = on_end
        self._maker = EventMaker(call.response, parse=call.parse)
        self._cancellation: list[Event] = []

    @property
    def response(self) -> ResponseObject:
        return self._maker.response

    @property
    def is_done(self) -> bool:
        return self._maker.is_done

    @property
    def so_far(self) -> StoredResponse:
        call = self._call
        return StoredResponse(self.response, call.items, call.owner, call.num_earlier)

    def close_when_unread(self, close: Callable[[], None]) -> None:
        """Calls `close` when the request is cancelled because the client has not read enough."""
        self._request_stream.bound_unread(close)

    async def events(self, *, idle_s: float | None = None) -> AsyncIterator[list[Event]]:
        """Yields the events that are ready, or an empty list after `idle_s` without any. Raises
        RequestFailed if the request fails before the first event.
        """
        async for batch in self._request_stream.batches(idle_s=idle_s):
            chunks = [_with_our_param(chunk) for chunk in batch]
            self.error = next((chunk.error for chunk in chunks if chunk.error is not None), None)
            if self.error is not None and not self._maker.is_open:
                raise RequestFailed(self.error)
            events = self._maker.open()
            for chunk in chunks:
                events += self._maker.add(chunk)
            self._report_end()
            if events or not chunks:
                yield events
        if self._cancellation:
            yield self._cancellation

    def fail(self, info: ErrorInfo) -> list[Event]:
        """Ends the response with an error and returns its last events."""
        if self.is_done:
            return []
        events = self._maker.fail(info)
        self._report_end()
        return events

    def cancel(self) -> None:
        """Cancels the response. Its reader gets the last events, and unread output is dropped."""
        self._cancellation = self._maker.cancel()
        self._report_end()
        self._request_stream.cancel()

    def close(self) -> None:
        """Cancels the request unless it has ended, and drops what is unread."""
        self._request_stream.cancel()

    def _report_end(self) -> None:
        """Calls `on_end` once the response is done. It is stored before its last event is sent,
        because the client may then read it.
        """
        if self.is_done:
            self._on_end(self.so_far)


class Responses:
    """Creates, finds, cancels and deletes the responses of one server."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._live: dict[ResponseKey, LiveResponse] = {}
        self._background: set[asyncio.Task[None]] = set()  # readers without a client
        self._store = ResponseStore(
            max_count=context.options.max_stored_responses,
            max_bytes=context.options.max_stored_bytes,
        )
        self.conversations = Conversations(self._store)

    @contextmanager
    def running(self, call: ResponseCall) -> Iterator[LiveResponse]:
        """Runs a response. A reader that leaves early cancels it, and it is not stored."""
        live = self._begin(call)
        try:
            yield live
        finally:
            self._leave(live)

    def run_in_background(self, call: ResponseCall) -> ResponseObject:
        """Starts a response that runs to its end whether its client waits or not."""
        live = self._begin(call)
        task = asyncio.create_task(self._read_all(live))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return live.response

    def run_with_log(self, call: ResponseCall, streams: Streams) -> LiveResponse:
        """Starts a response whose events go to an event log, from which clients read them."""
        streams.check_enabled()
        live = self._begin(call)
        key = StreamKey(*live.so_far.key)
        log = streams.new_log(key, is_background=live.response.background)

        def write(events: list[Event]) -> None:
            log.extend(b"".join(frame_of(event)) for event in events)

        async def produce() -> None:
            try:
                async for events in live.events():
                    write(events)
            finally:
                self._leave(live)

        async def fail(info: ErrorInfo) -> None:
            if log.next:
                write(live.fail(info))
            else:
                log.refuse(info)

        streams.run(key, produce, fail)
        return live

    async def close(self) -> None:
        """Ends the responses in the background. The server stops."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _read_all(self, live: LiveResponse) -> None:
        try:
            async for _ in live.events():
                pass
        except RequestFailed as failed:
            live.fail(failed.info)
        finally:
            # It has ended by now, unless by a bug, which asyncio logs, or the end of the server.
            live.fail(BugError(f"internal error; the response is {live.response.id}").info())
            self._leave(live)

    def _begin(self, call: ResponseCall) -> LiveResponse:
        refusal = self._context.state.refusal()
        if refusal is not None:
            raise refusal
        request_stream = self._context.gateway.open(*call.call.requests)
        live = LiveResponse(call, request_stream, on_end=self._ended)
        self._live[live.so_far.key] = live
        return live

    def _leave(self, live: LiveResponse) -> None:
        self._live.pop(live.so_far.key, None)
        live.close()

    def conversation_items(self, key: ResponseKey) -> tuple[Item, ...]:
        return self.conversations.get(key).items

    def response_items(self, key: ResponseKey) -> tuple[Item, ...]:
        """Returns the items up to the end of that response. Raises InvalidRequest if unknown."""
        stored = self._store.get(key)
        if stored is None:
            raise InvalidRequest(
                f"Previous response with id '{key.response_id[:80]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.conversation

    def get(self, key: ResponseKey) -> StoredResponse:
        """Returns a response, which may still run. Raises NotFound."""
        live = self._live.get(key)
        if live is not None and live.response.store:
            return live.so_far
        stored = self._store.get(key)
        if stored is None:
            raise _not_found(key)
        return stored

    def delete(self, key: ResponseKey) -> None:
        """Deletes a stored response. One that runs is cancelled. Raises NotFound."""
        live = self._live.get(key)
        if live is not None and live.response.store:
            live.cancel()  # which stores it
        if not self._store.delete(key):
            raise _not_found(key)

    def cancel(self, key: ResponseKey) -> ResponseObject:
        """Cancels a running response; cancelling it again changes nothing."""
        live = self._live.get(key)
        if live is not None:
            live.cancel()
            return live.response
        response = self.get(key).response
        if response.status != "cancelled":
            raise InvalidRequest(
                f"Response '{response.id}' cannot be cancelled: it is {response.status}.",
                code="response_not_in_progress",
            )
        return response

    def _ended(self, ended: StoredResponse) -> None:
        """Moves a response from the running ones to the store."""
        self._live.pop(ended.key, None)
        if ended.response.store:
            self._store.put(ended)
        self.conversations.extend(ended)


def _with_our_param(chunk: OutputChunk) -> OutputChunk:
    """Renames an error's field: the engine says `messages`, this endpoint `input`."""
    if chunk.error is None or chunk.error.param != "messages":
        return chunk
    return msgspec.structs.replace(chunk, error=msgspec.structs.replace(chunk.error, param="input"))


def _not_found(key: ResponseKey) -> NotFound:
    """Makes the same error for an unknown response and for one of another owner."""
    return NotFound(
        f"Response with id '{key.response_id[:80]}' not found.", code="response_not_found"
    )


RESPONSES = web.AppKey("responses", Responses)
