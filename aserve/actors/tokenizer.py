"""The tokenizer actor: it encodes prompts, which is the first step of every request.

It alone writes which requests are being prepared in threads.
"""

from __future__ import annotations

import asyncio
from typing import assert_never

from msgspec.structs import replace

from aserve.actors.admission import TokenizeQueue, has_pictures, prompt_size, too_early
from aserve.actors.base import Actor, Story
from aserve.actors.deadlines import Deadlines, deadlines_from_now, until_left
from aserve.actors.fair_threads import FairThreads
from aserve.channel import Channel, Sink
from aserve.errors import ErrorInfo
from aserve.messages.changes import Amend, Amended
from aserve.messages.output import DetokenizerEvent, Refused
from aserve.messages.requests import Cancel, EngineEvent, GenerateRequest, TokenizerEvent
from aserve.pictures.fetch import MediaFetcher
from aserve.text.prompt import Prepared, PromptEncoder

LONG_TEXT = 2_000  # characters or ids, about 1 ms of work; longer ones go to a thread
WORD_SIZE = 100  # the work for one bad word, in the same unit
NUM_THREADS = 2


class TokenizerActor(Actor[TokenizerEvent]):
    """Encodes short prompts on the loop, in order of arrival. A prompt that is longer than
    LONG_TEXT, alone or together with those before it in its batch, is encoded in a thread, and so
    is one whose pictures must be fetched first.

    A request ends here with Refused, or continues as OpenText to the detokenizer and then as
    AdmitRequest to the engine. A cancel follows its request and cannot overtake it. If the client
    leaves, or the timeout ends, while a request waits for a thread, it ends at once.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        *,
        detokenizer: Channel[DetokenizerEvent],
        engine: Sink[EngineEvent],
        queue: TokenizeQueue | None = None,
        story: Story | None = None,
        media: MediaFetcher | None = None,
    ) -> None:
        super().__init__("tokenizer", story=story)
        self._encoder = encoder
        self._detokenizer = detokenizer
        self._engine = engine
        self._queue = queue or TokenizeQueue()
        self._media = media or MediaFetcher()
        self._threads: FairThreads[Prepared] = FairThreads(NUM_THREADS)
        # requests that are prepared in threads; the future completes when the client leaves
        self._preparing: dict[str, asyncio.Future[None]] = {}
        self._num_chars = 0  # of their prompts

    def handle(self, events: list[TokenizerEvent]) -> None:
        room = LONG_TEXT
        for event in events:
            match event:
                case GenerateRequest():
                    deadlines = deadlines_from_now(event)
                    size = prompt_size(event.prompt) + len(event.prediction)
                    size += WORD_SIZE * len(event.sampling.bad_words)
                    if size > room or has_pictures(event.prompt):
                        self.attempt(event.request_id, self._prepare_later, event, size, deadlines)
                    else:
                        room -= size
                        self.attempt(event.request_id, self._prepare_now, event, deadlines)
                case Cancel():
                    self.attempt(event.request_id, self._cancel, event)
                case Amend() if event.request_id in self._preparing:
                    self._detokenizer.send(Amended(event, error=too_early().info()))
                case Amend():
                    self._engine.send(event)
                case _:
                    assert_never(event)

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        self._detokenizer.send(Refused(request_id, error))

    async def stop(self) -> None:
        await super().stop()
        await self._media.close()
        self._threads.close()

    def _prepare_now(self, request: GenerateRequest, deadlines: Deadlines) -> None:
        self._pass_on(self._encoder.prepare(request), deadlines)

    def _prepare_later(self, request: GenerateRequest, size: int, deadlines: Deadlines) -> None:
        self._encoder.check_size(request)
        self._queue.check(size, num_waiting=len(self._preparing), num_chars=self._num_chars)
        gone = asyncio.get_running_loop().create_future()
        self._preparing[request.request_id] = gone
        self._num_chars += size
        work = self._prepare_in_thread(request, size, gone=gone, deadlines=deadlines)
        self.spawn_for(request.request_id, work)

    async def _prepare_in_thread(
        self,
        request: GenerateRequest,
        size: int,
        *,
        gone: asyncio.Future[None],
        deadlines: Deadlines,
    ) -> None:
        """NOTE: on a cancel or timeout, work that waits for a thread is dropped. Work that runs
        continues to its end, and its result is ignored.
        """
        try:
            async with until_left(gone, deadlines), self._media.fetched(request.prompt) as prompt:
                request = replace(request, prompt=prompt)
                prepared = await self._threads.run(request.client, self._encoder.prepare, request)
        finally:
            self._num_chars -= size
            del self._preparing[request.request_id]
        self._pass_on(prepared, deadlines)

    def _pass_on(self, prepared: Prepared, deadlines: Deadlines) -> None:
        self._detokenizer.send(prepared.open)
        self._engine.send(deadlines.set_in(prepared.admit))

    def _cancel(self, cancel: Cancel) -> None:
        gone = self._preparing.get(cancel.request_id)
        if gone is None:
            self._engine.send(cancel)
        elif not gone.done():
            gone.set_result(None)
