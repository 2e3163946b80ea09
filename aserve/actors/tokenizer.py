"""The tokenizer actor: prompts to ids, grammars to matchers; the first step of every request.

Must not know scheduling, the device, HTTP or how grammars are compiled. Which requests are being
prepared beside the loop is written here alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from aserve.actors.base import Actor
from aserve.actors.masks import MaskEvent
from aserve.channel import Channel, Codec
from aserve.errors import AserveError, Cancelled, DeadlineExceeded
from aserve.grammar.matching import Constraint
from aserve.messages import (
    AdmitRequest,
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

Outcome: TypeAlias = Prepared | AserveError


@dataclass(frozen=True, slots=True)
class GrammarPorts:
    """`constrain` takes its time, and raises the AserveError of a grammar that is no good."""

    constrain: Callable[[AdmitRequest], Awaitable[Constraint]]
    masks: Channel[MaskEvent]


class TokenizerActor(Actor[TokenizerEvent]):
    """Requests are answered in order of arrival, but for those that are prepared beside the loop:
    prompts longer than a turn of the loop may last, alone or together with those before them in the
    same batch, and requests with a grammar.

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
        grammars: GrammarPorts,
        codec: Codec | None = None,
    ) -> None:
        super().__init__("tokenizer", codec=codec)
        self._encoder = encoder
        self._detokenizer = detokenizer
        self._scheduler = scheduler
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._preparing: dict[str, Cancel | None] = {}  # with the cancel that came meanwhile

    def handle(self, events: list[TokenizerEvent]) -> None:
        room = LONG_TEXT
        for event in events:
            match event:
                case GenerateRequest():
                    size = prompt_size(event.prompt) + WORD_SIZE * len(event.sampling.bad_words)
                    if size > room:
                        self._begin(event, None)
                        continue
                    room -= size
                    outcome = prepare(self._encoder, event)
                    if event.sampling.grammar is not None:
                        self._begin(event, outcome)
                    else:
                        self._answer(event.request_id, outcome)
                case Cancel():
                    self._cancel(event)
                case _:
                    assert_never(event)

    async def stop(self) -> None:
        await super().stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, request: GenerateRequest, outcome: Outcome | None) -> None:
        self._preparing[request.request_id] = None
        self.spawn(self._prepare_beside(request, outcome))

    async def _prepare_beside(self, request: GenerateRequest, outcome: Outcome | None) -> None:
        """`outcome`: of the prompt, None if a thread is to find out."""
        loop = asyncio.get_running_loop()
        if outcome is None:
            outcome = await loop.run_in_executor(self._threads, prepare, self._encoder, request)
        constraint = None
        if isinstance(outcome, Prepared) and request.sampling.grammar is not None:
            try:
                async with asyncio.timeout(request.timeout_s):
                    constraint = await self._grammars.constrain(outcome.admit)
            except AserveError as error:
                outcome = error
            except TimeoutError:
                outcome = DeadlineExceeded("the request's timeout ran out before its first step")
        if self._preparing.pop(request.request_id) is not None:
            outcome = Cancelled("the client went away before its request was prepared")
        elif constraint is not None:
            self._grammars.masks.send(constraint)
        self._answer(request.request_id, outcome)

    def _cancel(self, cancel: Cancel) -> None:
        if cancel.request_id in self._preparing:
            self._preparing[cancel.request_id] = cancel
        else:
            self._scheduler.send(cancel)

    def _answer(self, request_id: str, outcome: Outcome) -> None:
        if isinstance(outcome, AserveError):
            self._detokenizer.send(Refused(request_id, outcome.info()))
            return
        self._detokenizer.send(outcome.open)
        self._scheduler.send(outcome.admit)


def prepare(encoder: PromptEncoder, request: GenerateRequest) -> Outcome:
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
