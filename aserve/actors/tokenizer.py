"""The tokenizer actor: prompts to ids, the first step of every request.

Must not know scheduling, the device or HTTP. Which requests are in a thread is written here alone.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

from aserve.actors.base import Actor
from aserve.channel import Channel, Codec
from aserve.errors import AserveError, Cancelled
from aserve.messages import (
    Cancel,
    ChatPrompt,
    DetokenizerEvent,
    GenerateRequest,
    Prompt,
    Refused,
    SchedulerEvent,
    TextPrompt,
    TokenizerEvent,
    TokenPrompt,
)
from aserve.text.prompt import Prepared, PromptEncoder

LONG_TEXT = 2_000  # characters or ids, about 1 ms of work: beyond it a thread goes on
WORD_SIZE = 100  # what a bad word takes, in the same measure
NUM_THREADS = 2


class TokenizerActor(Actor[TokenizerEvent]):
    """Prompts are answered in order of arrival, but for those that a thread takes: what is longer
    than a turn of the loop may last, alone or together with those before it in the same batch.

    A request ends here with Refused, or goes on as OpenText to the detokenizer, then AdmitRequest
    to the scheduler. Cancels pass through after their request, so the scheduler never meets a
    request whose cancel it has already dropped.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        *,
        detokenizer: Channel[DetokenizerEvent],
        scheduler: Channel[SchedulerEvent],
        codec: Codec | None = None,
    ) -> None:
        super().__init__("tokenizer", codec=codec)
        self._encoder = encoder
        self._detokenizer = detokenizer
        self._scheduler = scheduler
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._in_thread: dict[str, Cancel | None] = {}  # with the cancel that came meanwhile

    def handle(self, events: list[TokenizerEvent]) -> None:
        room = LONG_TEXT
        for event in events:
            match event:
                case GenerateRequest():
                    size = prompt_size(event.prompt) + WORD_SIZE * len(event.sampling.bad_words)
                    if size > room:
                        self._begin_in_thread(event)
                    else:
                        room -= size
                        self._answer(event.request_id, prepare(self._encoder, event))
                case Cancel():
                    self._cancel(event)
                case _:
                    assert_never(event)

    async def stop(self) -> None:
        await super().stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin_in_thread(self, request: GenerateRequest) -> None:
        self._in_thread[request.request_id] = None
        self.spawn(self._prepare_in_thread(request))

    async def _prepare_in_thread(self, request: GenerateRequest) -> None:
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._threads, prepare, self._encoder, request)
        if self._in_thread.pop(request.request_id) is not None:
            outcome = Cancelled("the client went away before its prompt was tokenized")
        self._answer(request.request_id, outcome)

    def _cancel(self, cancel: Cancel) -> None:
        if cancel.request_id in self._in_thread:
            self._in_thread[cancel.request_id] = cancel
        else:
            self._scheduler.send(cancel)

    def _answer(self, request_id: str, outcome: Prepared | AserveError) -> None:
        if isinstance(outcome, AserveError):
            self._detokenizer.send(Refused(request_id, outcome.info()))
            return
        self._detokenizer.send(outcome.open)
        self._scheduler.send(outcome.admit)


def prepare(encoder: PromptEncoder, request: GenerateRequest) -> Prepared | AserveError:
    try:
        return encoder.prepare(request)
    except AserveError as error:
        return error


def prompt_size(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.token_ids)
        case ChatPrompt():
            return len(prompt.messages) + len(prompt.tools or b"")
