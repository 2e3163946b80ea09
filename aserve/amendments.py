"""Changes to the frontend's open requests: questions to the scheduler, and its answers.

`Amendments` alone writes which questions wait for an answer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import msgspec

from aserve.errors import EngineDead
from aserve.messages.changes import Amend, Amended
from aserve.messages.requests import AdmitRequest, GenerateRequest, SamplingParams

ANSWER_S = 10.0  # an engine that is being started again has lost the question


class Amendments:
    """`on_change` hears of each change that was made, so that a request can be sent again as it is
    now.
    """

    def __init__(
        self, *, send: Callable[[Amend], None], on_change: Callable[[Amend], None]
    ) -> None:
        self._send = send
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Amended]] = {}

    async def ask(self, request_id: str, change: Amend) -> Amended:
        """Sends the change for this request, and returns the scheduler's answer."""
        number = next(self._numbers)
        answer: asyncio.Future[Amended] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(msgspec.structs.replace(change, request_id=request_id, number=number))
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise EngineDead(
                f"The engine has not answered within {ANSWER_S:.0f} s, so it is not known whether "
                "the request was changed. It is safe to send the change again.",
                code="engine_timeout",
            ) from None
        finally:
            del self._waiting[number]

    def receive(self, answer: Amended) -> None:
        if answer.error is None and answer.sequences:
            self._on_change(answer.amend)
        waiting = self._waiting.get(answer.amend.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


def amended(request: GenerateRequest, change: Amend) -> GenerateRequest:
    """Returns the request as it is after a change."""
    return msgspec.structs.replace(
        request,
        sampling=_amended_sampling(request.sampling, change),
        priority=request.priority if change.priority is None else change.priority,
    )


def amended_admit(request: AdmitRequest, change: Amend) -> AdmitRequest:
    """Returns the request as it is after a change, for an engine that continues it."""
    reasoning = request.reasoning
    if change.ends_reasoning and reasoning is not None:
        reasoning = msgspec.structs.replace(reasoning, max_tokens=0)
    return msgspec.structs.replace(
        request,
        sampling=_amended_sampling(request.sampling, change),
        priority=request.priority if change.priority is None else change.priority,
        reasoning=reasoning,
    )


def _amended_sampling(sampling: SamplingParams, change: Amend) -> SamplingParams:
    reasoning = sampling.reasoning
    if change.ends_reasoning and reasoning is not None:
        reasoning = msgspec.structs.replace(reasoning, max_tokens=0)
    return msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens if change.max_tokens is None else change.max_tokens,
        stop=tuple(dict.fromkeys(sampling.stop + change.stop)),
        reasoning=reasoning,
    )
