"""The responses that run, and by their ids those that have ended.

Must not know HTTP's verbs or frames. What runs is written by `Responses`; a response's events are
read by the one that asked for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from aserve.errors import ErrorInfo, InvalidRequest, NotFound
from aserve.http.errors import RequestFailed
from aserve.http.responses.call import ResponseCall
from aserve.http.responses.conversation import Message
from aserve.http.responses.events import Event, EventMaker
from aserve.http.responses.records import ResponseObject
from aserve.http.responses.store import ResponseKey, ResponseStore, StoredResponse
from aserve.http.state import HttpContext
from aserve.messages.output import OutputChunk
from aserve.request_stream import RequestStream


class LiveResponse:
    """One response from its first event to its last."""

    def __init__(
        self,
        asked: ResponseCall,
        request_stream: RequestStream,
        *,
        on_end: Callable[[StoredResponse], None],
        stream_id: str | UnsetType = UNSET,
    ) -> None:
        self.error: ErrorInfo | None = None  # why it failed
        self._asked = asked
        self._outlet = request_stream
        self._on_end = on_end
        self._maker = EventMaker(asked.heading, stream_id=stream_id)
        self._cancellation: list[Event] = []

    @property
    def response(self) -> ResponseObject:
        return self._maker.response

    @property
    def is_done(self) -> bool:
        return self._maker.is_done

    @property
    def so_far(self) -> StoredResponse:
        return StoredResponse(self.response, self._asked.messages, self._asked.owner)

    def close_when_unread(self, close: Callable[[], None]) -> None:
        """`close` is called if the client reads so little that the request was cancelled."""
        self._outlet.bound_unread(close)

    async def events(self, *, idle_s: float | None = None) -> AsyncIterator[list[Event]]:
        """All that are ready; none after idle_s of silence. RequestFailed if it never began."""
        async for batch in self._outlet.batches(idle_s=idle_s):
            chunks = [_in_our_words(chunk) for chunk in batch]
            self.error = next((chunk.error for chunk in chunks if chunk.error is not None), None)
            if self.error is not None and not self._maker.is_open:
                raise RequestFailed(self.error)
            events = self._maker.open()
            for chunk in chunks:
                events += self._maker.add(chunk)
            self._note_end()
            if events or not chunks:
                yield events
        if self._cancellation:
            yield self._cancellation

    def fail(self, info: ErrorInfo) -> list[Event]:
        """The server cannot go on with it."""
        if self.is_done:
            return []
        events = self._maker.fail(info)
        self._note_end()
        return events

    def cancel(self) -> None:
        """Its reader gets the last events; output that it hasn't read falls away."""
        self._cancellation = self._maker.cancel()
        self._note_end()
        self._outlet.cancel()

    def _note_end(self) -> None:
        """Before the client hears of it, which may ask for it at once."""
        if self.is_done:
            self._on_end(self.so_far)


class Responses:
    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._live: dict[ResponseKey, LiveResponse] = {}
        self._store = ResponseStore(
            max_count=context.options.max_stored_responses,
            max_bytes=context.options.max_stored_bytes,
        )

    @contextmanager
    def running(
        self, asked: ResponseCall, *, stream_id: str | UnsetType = UNSET
    ) -> Iterator[LiveResponse]:
        """A reader that leaves early cancels it, and nothing of it is kept."""
        refusal = self._context.state.refusal()
        if refusal is not None:
            raise refusal
        request_stream = self._context.gateway.open(*asked.call.requests)
        live = LiveResponse(asked, request_stream, on_end=self._ended, stream_id=stream_id)
        key = live.so_far.key
        self._live[key] = live
        try:
            yield live
        finally:
            self._live.pop(key, None)
            request_stream.cancel()

    def conversation(self, key: ResponseKey) -> tuple[Message, ...]:
        """What was said up to the end of that response."""
        stored = self._store.get(key)
        if stored is None:
            raise InvalidRequest(
                f"Previous response with id '{key.response_id[:80]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.conversation

    def get(self, key: ResponseKey) -> StoredResponse:
        """Also while it runs."""
        live = self._live.get(key)
        if live is not None and live.response.store:
            return live.so_far
        stored = self._store.get(key)
        if stored is None:
            raise _not_found(key)
        return stored

    def delete(self, key: ResponseKey) -> None:
        if not self._store.delete(key):
            raise _not_found(key)

    def cancel(self, key: ResponseKey) -> ResponseObject:
        """What has been cancelled stays so."""
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
        """Its reader may have left already, and failed it from there."""
        self._live.pop(ended.key, None)
        if ended.response.store:
            self._store.put(ended)


def _in_our_words(chunk: OutputChunk) -> OutputChunk:
    """The engine calls a conversation by the name that it has in chats."""
    if chunk.error is None or chunk.error.param != "messages":
        return chunk
    return msgspec.structs.replace(chunk, error=msgspec.structs.replace(chunk.error, param="input"))


def _not_found(key: ResponseKey) -> NotFound:
    """The same for a response of another owner."""
    return NotFound(
        f"Response with id '{key.response_id[:80]}' not found.", code="response_not_found"
    )


RESPONSES = web.AppKey("responses", Responses)  # there is one of each server
