"""One request among sixteen meets an exception that nobody expected, in each step of each actor:
it ends with one final message, and everything else goes on as if it had not been there. What kinds
of exceptions there are is shown in test_base.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, NamedTuple

import pytest

from aserve.actors import scheduler as scheduler_module
from aserve.actors import tokenizer as tokenizer_module
from aserve.actors.deadlines import RequestTimers
from aserve.actors.detokenizer import DetokenizerActor
from aserve.actors.scheduler import SchedulerActor
from aserve.actors.text_request import TextRequest
from aserve.engine import Answer, Engine, GenerationError
from aserve.frontend import Frontend
from aserve.messages.output import OutputChunk, Refused, Retired, SequenceOutput
from aserve.messages.requests import AdmitRequest, GenerateRequest, OpenText
from aserve.request_stream import Gateway, RequestStream
from aserve.scheduling import admit, refusals
from aserve.scheduling.request import Sequence
from aserve.text.prompt import Prepared, PromptEncoder
from tests.test_engine import Loader, engine, expected

NUM_REQUESTS = 16
GUILTY = 7
GUILTY_ID = f"request-{GUILTY + 1}"
PROMPT = [5, 6, 7]
MAX_TOKENS = 5

NAMED = (
    GenerateRequest,
    OpenText,
    SequenceOutput,
    Retired,
    Refused,
    OutputChunk,
    AdmitRequest,
    Sequence,
)


class Step(NamedTuple):
    """A function that works for one request at a time; `only_once` where its end comes through the
    same function.
    """

    owner: Any
    name: str
    is_after: bool  # the exception comes when the work was done, else before it
    only_once: bool = False
    in_thread: bool = False

    def __str__(self) -> str:
        when = "after" if self.is_after else "before"
        return f"{when}_{self.name}{'_in_thread' if self.in_thread else ''}"


BOTH = (False, True)
STEPS = [
    *(Step(PromptEncoder, "prepare", after, in_thread=t) for after in BOTH for t in BOTH),
    Step(tokenizer_module.TokenizerActor, "_pass_on", is_after=False),
    *(
        Step(DetokenizerActor, name, after)
        for name in ("_feed", "_retire", "_send")
        for after in BOTH
    ),
    *(Step(TextRequest, "begin", after) for after in BOTH),
    *(Step(Frontend, "_deliver", after, only_once=True) for after in BOTH),
    *(Step(Gateway, "deliver", after, only_once=True) for after in BOTH),
    *(Step(RequestStream, "put", after, only_once=True) for after in BOTH),
    *(Step(scheduler_module, "check_request", after) for after in BOTH),
    *(Step(admit, "Sequence", after) for after in BOTH),
    *(Step(refusals, "fits_alone", after) for after in BOTH),
    Step(RequestTimers, "start", is_after=False),
]


def unexpected() -> None:
    raise RuntimeError("nobody expected this")


def names_guilty(values: tuple[Any, ...]) -> bool:
    """Whether an argument is the guilty request's, or its id."""
    return any(id_of(value) == GUILTY_ID for value in values)


def id_of(value: Any) -> str | None:
    if isinstance(value, Prepared):
        return value.open.request_id
    if isinstance(value, TextRequest):
        return value.opened.request_id
    if isinstance(value, NAMED):
        return value.request_id
    return value if isinstance(value, str) else None


def break_step(patch: pytest.MonkeyPatch, step: Step) -> list[None]:
    """What the broken step raised, so that a test sees that it was met."""
    original = getattr(step.owner, step.name)
    raised: list[None] = []

    def broken(*values: Any, **named: Any) -> Any:
        is_due = names_guilty(values) and not (step.only_once and raised)
        if is_due and not step.is_after:
            raised.append(None)
            unexpected()
        result = original(*values, **named)
        if is_due and step.is_after:
            raised.append(None)
            unexpected()
        return result

    patch.setattr(step.owner, step.name, broken)
    return raised


def count_ends(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Final messages that reach readers, by request."""
    ends: Counter[str] = Counter()
    put = RequestStream.put

    def counted(request_stream: RequestStream, chunk: OutputChunk) -> None:
        put(request_stream, chunk)
        ends[chunk.request_id] += chunk.is_last

    patch.setattr(RequestStream, "put", counted)
    return ends


async def answers_of(running: Engine) -> list[Answer | BaseException]:
    return await asyncio.gather(
        *(
            running.answer(PROMPT, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True, timeout=60)
            for seed in range(NUM_REQUESTS)
        ),
        return_exceptions=True,
    )


def nothing_is_held(running: Engine) -> bool:
    """No request, row, page or timer of anybody."""
    supervisor = running._frontend._running
    assert supervisor is not None
    actors = {actor.name: actor for actor in supervisor.supervisor._actors}
    scheduler, detokenizer = actors["scheduler"], actors["detokenizer"]
    assert isinstance(scheduler, SchedulerActor)
    assert isinstance(detokenizer, DetokenizerActor)
    state = scheduler._scheduler.state
    return (
        not state.groups
        and not state.running
        and not len(scheduler._timers)
        and not scheduler.inbox
        and detokenizer.num_requests == 0
        and state.cache.num_used(0) == 0
        and state.is_device_idle
    )


@pytest.mark.parametrize("step", STEPS, ids=str)
async def test_an_exception_ends_one_request_of_sixteen(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = count_ends(monkeypatch)
    raised = break_step(monkeypatch, step)
    if step.in_thread:
        monkeypatch.setattr(tokenizer_module, "LONG_TEXT", 0)
    async with asyncio.timeout(30), engine(Loader()) as running:
        before = asyncio.all_tasks()
        answers = await answers_of(running)
        for seed, answer in enumerate(answers):
            if seed == GUILTY:
                continue
            assert isinstance(answer, Answer), answer
            assert list(answer.choices[0].token_ids) == expected(seed=seed, max_tokens=MAX_TOKENS)
        guilty = answers[GUILTY]
        assert raised, "the step was never met"
        if isinstance(guilty, GenerationError):
            assert (guilty.reason.code, guilty.reason.status) == ("bug", 500)
            assert "expected this" not in guilty.reason.message
        else:
            assert step.is_after, "its work was not done, so it has no answer"
        assert set(ends.values()) == {1}
        assert running._frontend.failure is None
        later = await running.answer(PROMPT, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert list(later.choices[0].token_ids) == expected(seed=3, max_tokens=MAX_TOKENS)
        for _ in range(1000):
            await asyncio.sleep(0)
            if nothing_is_held(running):
                break
        assert nothing_is_held(running)
        assert asyncio.all_tasks() == before
