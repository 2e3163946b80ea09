"""The detokenizer actor: it turns output tokens into the chunks that clients get.

It alone writes the text of open requests. It finds stop strings, cuts text, usage and logprobs at
the same token, and sends each final chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from aserve.actors.base import Actor, Story
from aserve.actors.text_request import Ending, TextRequest, ending_of, resumed_children
from aserve.actors.text_slices import Part, TextEvent, sliced
from aserve.channel import Channel, Sink
from aserve.errors import BugError, ErrorInfo
from aserve.messages.changes import Amended
from aserve.messages.output import (
    DetokenizerEvent,
    OutputChunk,
    Refused,
    Retired,
    SequenceOutput,
    failed_chunk,
)
from aserve.messages.requests import Cancel, EngineEvent, OpenText
from aserve.text.tokenizer import TextTokenizer


class DetokenizerActor(Actor[DetokenizerEvent]):
    """Sends at most one chunk per child for all its messages of one inbox batch.

    A request whose work raised is cancelled, and later messages about it are ignored until all its
    children have retired.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        deliver: Callable[[OutputChunk], None],
        answer: Callable[[Amended], None],
        engine: Sink[EngineEvent],
        inbox: Channel[DetokenizerEvent],
        story: Story | None = None,
    ) -> None:
        super().__init__("detokenizer", inbox=inbox, story=story)
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._answer = answer
        self._engine = engine
        # PERF: the state of a request has 1 kB, which one that waits does not need yet.
        self._waiting: dict[str, OpenText] = {}
        self._requests: dict[str, TextRequest] = {}
        self._failed: dict[str, TextRequest] = {}  # ended here, but not all children have retired

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._requests) + len(self._failed)

    async def run(self) -> None:
        async for parts in sliced(self.inbox, self.num_children):
            self.beat()
            for part in parts:
                self.advance(part)

    def num_children(self, request_id: str) -> int:
        request = self._requests.get(request_id)
        opened = request.opened if request else self._waiting.get(request_id)
        return opened.sampling.n if opened else 1

    def advance(self, part: Part) -> None:
        """Handles messages about one request, in order, and sends what they make certain."""
        request_id, events, is_plain = part
        if is_plain:
            self.attempt(request_id, self._continue, request_id, events)
            return
        touched: dict[int, None] = {}  # its children that may have something to send
        for event in events:
            self.attempt(request_id, self._note, event, touched)
        if touched:
            self.attempt(request_id, self._send, request_id, touched)
        for event in events:
            if isinstance(event, Retired):
                self._forget_retired(event)

    def _continue(self, request_id: str, outputs: list[TextEvent]) -> None:
        """PERF: nearly all messages are outputs, so these are handled in one attempt."""
        touched: dict[int, None] = {}
        for output in outputs:
            assert isinstance(output, SequenceOutput)
            self._feed(output, touched)
        self._send(request_id, touched)

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        """Cancels the request in the engine and sends its last chunk, if that was not sent."""
        request = self._requests.pop(request_id, None)
        is_over = request is not None and request.is_over
        if request is not None:
            self._failed[request_id] = request
        self._engine.send(Cancel(request_id, None, 0, "cancelled"))
        if not is_over:
            self._deliver(failed_chunk(request_id, error))

    def _find(self, request_id: str) -> TextRequest | None:
        """Returns the state of an open request, which is made when its first event comes."""
        request = self._requests.get(request_id)
        if request is None and request_id in self._waiting:
            request = TextRequest(self._waiting.pop(request_id))
            self._requests[request_id] = request
            request.begin(self._tokenizer)
        return request

    def _note(self, event: TextEvent, touched: dict[int, None]) -> None:
        match event:
            case OpenText():
                self._waiting[event.request_id] = event
                touched.update(resumed_children(event))
            case Retired():
                self._retire(event, touched)
            case Refused():
                self._refuse(event)
            case Amended():
                self._amend(event)
            case SequenceOutput():
                self._feed(event, touched)
            case _:
                assert_never(event)

    def _feed(self, output: SequenceOutput, touched: dict[int, None]) -> None:
        request = self._requests.get(output.request_id) or self._open_request(output.request_id)
        if request is not None:
            request.feed(output, touched, self._tokenizer)

    def _retire(self, event: Retired, touched: dict[int, None]) -> None:
        request = self._open_request(event.request_id)
        if request is None:
            return
        request.touch(event.child, touched)
        child = request.children[event.child]
        child.is_retired = True
        if child.ending is not None:
            return
        child.text.finish()
        if child.text.stop is not None:
            child.ending = Ending("stop", child.text.stop)
        else:
            child.ending = ending_of(event, request)

    def _refuse(self, event: Refused) -> None:
        if self._failed.pop(event.request_id, None) is None:
            self._waiting.pop(event.request_id, None)
            self._requests.pop(event.request_id, None)
            self._deliver(failed_chunk(event.request_id, event.error))

    def _amend(self, event: Amended) -> None:
        """Adds stop strings, which count from here on, and passes the answer on."""
        request = self._find(event.amend.request_id)
        if request is not None and event.error is None:
            for state in event.sequences:
                request.children[state.child].text.add_stops(event.amend.stop)
        self._answer(event)

    def _open_request(self, request_id: str) -> TextRequest | None:
        """Returns None for a request that ended here before the engine knew."""
        request = self._find(request_id)
        if request is None and request_id not in self._failed:
            raise BugError(f"a message names request {request_id}, which is not open")
        return request

    def _send(self, request_id: str, touched: dict[int, None]) -> None:
        request = self._requests.get(request_id) or self._find(request_id)
        if request is None:
            return
        for index in touched:
            child = request.children[index]
            chunk = None if child.is_finished else request.next_chunk(index)
            if chunk is None:
                continue
            if child.is_finished and child.text.stop is not None and not child.is_retired:
                self._engine.send(Cancel(request_id, index, child.text.num_kept, "stop"))
            self._deliver(chunk)
            request.is_over = chunk.is_last

    def _forget_retired(self, event: Retired) -> None:
        """Forgets the request, open or failed, once all its children have retired."""
        for requests in (self._requests, self._failed):
            request = requests.get(event.request_id)
            if request is not None:
                request.num_retired += 1
                if request.is_retired:
                    del requests[event.request_id]
