"""The journal between a real text side and engines that vanish: whichever message was the last one
of an engine, the answers are those of one engine that lives.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from aserve.actors.supervisor import Supervised
from aserve.channel import Sink
from aserve.config import Facts, Raw, Resolved, resolve
from aserve.engine_core import EngineCorePorts, LocalEngineCore
from aserve.errors import ErrorInfo
from aserve.frontend import Frontend
from aserve.grammar.compile import Vocabulary
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.changes import Amend, Amended, EngineJob, SequenceState
from aserve.messages.output import (
    DetokenizerEvent,
    NextTokens,
    OutputChunk,
    Refused,
    Retired,
    SequenceOutput,
    StepOutput,
)
from aserve.messages.requests import (
    AdmitRequest,
    Cancel,
    EngineEvent,
    GenerateRequest,
    ReasoningIds,
    ReasoningParams,
    RequestEvent,
    SamplingParams,
    TokenPrompt,
)
from aserve.processes import journal as module
from aserve.processes.journal import Journal
from aserve.text.load import TextSide
from tests.fakes.executor import FakeExecutor
from tests.text.vocabularies import byte_level_tokenizer

TEXT = TextSide(byte_level_tokenizer())
LONG = tuple(range(5, 43))  # more than one chunk of the prefill
LIMIT = ReasoningParams("qwen3_thinking", None, 4)  # the output begins inside of its reasoning
ASKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "sampled": ((5, 6, 7), {"seed": 3}),
    "greedy": ((9, 8), {"seed": 1, "temperature": 0.0, "max_tokens": 9}),
    "children": ((5, 6, 7), {"seed": 4, "n": 3, "max_tokens": 6}),
    "scored": (LONG, {"seed": 5, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 5}),
    "echoed": (LONG, {"seed": 6, "prompt_logprobs": 0, "echo": True, "max_tokens": 0}),
    "stopped": ((5, 6, 7), {"seed": 3, "stop": ("<stop>",), "n": 2}),
    "limited": ((5, 6, 7), {"seed": 9, "max_tokens": 24, "reasoning": LIMIT}),
    "ended": ((1, 2, 3), {"seed": 8, "ignore_eos": False, "return_token_ids": True}),
}


class VanishingCore:
    """An engine core that vanishes behind each message whose number is among `deaths`, and is
    continued by another one.
    """

    def __init__(self, ports: EngineCorePorts, resolved: Resolved, deaths: Iterable[int]) -> None:
        self.inbox: Sink[EngineEvent] = self
        self.actors: tuple[Supervised, ...] = ()
        self.num_messages = 0
        self._ports = ports
        self._resolved = resolved
        self._deaths = set(deaths)
        self._journal = Journal()
        self._core = self._new_core()
        self.spec = self._core.spec
        self._ended: list[LocalEngineCore] = []

    def send(self, message: EngineEvent) -> None:
        if isinstance(message, AdmitRequest):
            self._journal.admit(message, is_sent=True)
        elif isinstance(message, Cancel):
            assert self._journal.cancel(message) == []
        self._core.inbox.send(message)

    async def start(self, on_death: object) -> None:
        await self._start()

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        raise NotImplementedError

    async def close(self) -> None:
        for core in (*self._ended, self._core):
            for actor in core.actors:
                await actor.stop()
            await core.close()
        assert len(self._journal) == 0

    def age_s(self) -> float:
        return 0.0

    def _new_core(self) -> LocalEngineCore:
        number = len(getattr(self, "_ended", ()))
        ports = EngineCorePorts(_Output(self, number), lambda _: None, self._ports.trace)
        return LocalEngineCore(
            FakeExecutor(), self._resolved, ports=ports, vocabulary=lambda: Vocabulary((), 0, ())
        )

    async def _start(self) -> None:
        def died(name: str, error: BaseException) -> None:
            raise AssertionError(name) from error

        await self._core.start(died)
        for actor in self._core.actors:
            actor.start(died)

    def hear(self, message: DetokenizerEvent, number: int) -> None:
        if number != len(self._ended):
            return  # it has vanished
        assert isinstance(message, StepOutput | Retired | Refused)
        self.num_messages += 1
        news = self._journal.receive(message)
        if news is not None:
            self._ports.text.send(news)
        if self.num_messages in self._deaths:
            self._ended.append(self._core)
            for ended in self._journal.lose():
                self._ports.text.send(ended)
            self._core = self._new_core()
            self._send(self._journal.resume())
            self._starting = asyncio.ensure_future(self._start())
        self._send(self._journal.next_trial())

    def _send(self, messages: list[RequestEvent]) -> None:
        for message in messages:
            self._core.inbox.send(message)


class _Output:
    def __init__(self, core: VanishingCore, number: int) -> None:
        self._core, self._number = core, number

    def send(self, message: DetokenizerEvent) -> None:
        self._core.hear(message, self._number)


async def answers(*deaths: int, stop: str = "<stop>") -> tuple[dict[str, Any], int]:
    """What each child of each ask was sent, and the number of the engines' messages."""
    resolved = resolve(
        Raw(command_line={"debug_checks": True, "grammar_workers": 0}),
        Facts(default_model="none"),
    )
    frontend = Frontend(resolved)
    core = VanishingCore(frontend.ports, resolved, deaths)

    async def ask(name: str) -> list[OutputChunk]:
        prompt, fields = ASKS[name]
        fields = {"max_tokens": 12, "ignore_eos": True} | fields
        sampling = SamplingParams(**fields | ({"stop": (stop,)} if "stop" in fields else {}))
        request = GenerateRequest(name, TokenPrompt(prompt), sampling)
        return [chunk async for chunk in frontend.gateway.open(request)]

    async with asyncio.timeout(30):
        await frontend.join(core, TEXT)
        given = await asyncio.gather(*map(ask, ASKS))
        while len(core._journal):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await frontend.close()
    assert frontend.failure is None
    return {name: said(chunks) for name, chunks in zip(ASKS, given, strict=True)}, core.num_messages


def said(chunks: list[OutputChunk]) -> dict[int, tuple[object, ...]]:
    assert [chunk.is_last for chunk in chunks].count(True) == 1
    children: dict[int, list[OutputChunk]] = defaultdict(list)
    for chunk in chunks:
        children[chunk.child].append(chunk)
    return {
        child: (
            "".join(part.text for part in parts),
            array_i32(b"".join(part.token_ids for part in parts)).tolist(),
            [entry for part in parts for entry in part.logprobs],
            [token for part in parts if part.prompt for token in part.prompt.tokens],
            b"".join(part.prompt_ids for part in parts),
            [(part.finish_reason, part.stop_reason) for part in parts if part.finish_reason],
            parts[-1].usage,
        )
        for child, parts in children.items()
    }


@pytest.mark.slow
async def test_the_death_of_an_engine_behind_any_message_changes_nothing() -> None:
    plain, _ = await answers()
    stop = str(plain["sampled"][0][0])[5:7]
    whole, num_messages = await answers(stop=stop)
    assert whole["stopped"][0][5] == [("stop", stop)]
    assert num_messages > 20
    for number in range(1, num_messages):
        again, _ = await answers(number, number + 3, stop=stop)
        assert again == whole, f"the engine died behind message {number}"


def admit(name: str, n: int = 1) -> AdmitRequest:
    return AdmitRequest(name, pack_i32([1, 2]), SamplingParams(seed=1, max_tokens=50, n=n))


def output(name: str, *token_ids: int, position: int = 0, child: int = 0) -> StepOutput:
    return StepOutput(1, (SequenceOutput(name, child, position, pack_i32(token_ids), 1),))


def opened(*requests: AdmitRequest) -> Journal:
    journal = Journal()
    for request in requests:
        journal.admit(request, is_sent=True)
    return journal


def names_of(messages: Iterable[RequestEvent | Retired | Refused]) -> list[str]:
    return [message.request_id for message in messages]


def test_a_cancel_that_was_under_way_ends_with_the_engine_and_one_without_an_engine_at_once() -> (
    None
):
    journal = opened(admit("a"), admit("b", n=2), admit("c"))
    journal.receive(output("b", 7, 8, child=1))
    assert journal.cancel(Cancel("a", None, 0, "cancelled")) == []
    assert journal.cancel(Cancel("b", 1, 2, "stop")) == []
    assert journal.lose() == [Retired("a", 0, "cancelled", 0), Retired("b", 1, "stop", 2)]
    assert journal.cancel(Cancel("c", None, 0, "cancelled")) == [Retired("c", 0, "cancelled", 0)]
    again = admit("b", n=2)
    again = msgspec.structs.replace(again, outputs=(b"", pack_i32([7, 8])), is_resumed=True)
    assert journal.resume() == [again, Cancel("b", 1, 0, "cancelled")]
    assert journal.receive(Retired("b", 1, "cancelled", 2)) is None
    assert journal.receive(output("b", 9, position=2, child=1)) is None
    assert journal.receive(Retired("a", 0, "cancelled", 0)) is None
    assert journal.receive(Retired("b", 0, "length", 0)) is not None
    assert len(journal) == 0


def test_a_request_that_kills_every_engine_is_found_among_others_and_ends_alone() -> None:
    """The third of five. The others make progress in the trials, and in the end."""
    journal = opened(*map(admit, "abcde"))
    for _ in range(module.SUSPECT_DEATHS - 1):
        assert journal.lose() == []
        assert names_of(journal.resume()) == list("abcde")
    assert journal.lose() == []
    assert names_of(journal.resume()) == ["a"]
    for name, following in (("a", ["b"]), ("b", ["c"])):
        assert journal.next_trial() == []
        journal.receive(output(name, *range(module.MIN_PROGRESS)))
        assert names_of(journal.next_trial()) == following
    [refused] = journal.lose()
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.error.status) == ("c", 500)
    assert "request c was ended: the engine died 3 times" in refused.error.message
    assert names_of(journal.resume()) == ["a", "b", "d"]
    journal.receive(Retired("d", 0, "stop", 1))
    assert names_of(journal.next_trial()) == ["e"]


def test_who_makes_progress_in_each_engine_is_never_suspected() -> None:
    journal = opened(admit("a"))
    for life in range(5):
        start = life * module.MIN_PROGRESS
        journal.receive(output("a", *range(module.MIN_PROGRESS), position=start))
        assert journal.lose() == []
        [again] = journal.resume()
        assert isinstance(again, AdmitRequest)
        assert len(again.outputs[0]) == 4 * (start + module.MIN_PROGRESS)


def test_steps_pass_as_they_are_once_no_request_is_left_of_the_engine_before() -> None:
    """Until then all outputs are records, which keep what the first engine said."""
    journal = opened(admit("old"))
    journal.receive(output("old", 7))
    journal.lose()
    journal.admit(admit("new"), is_sent=True)
    journal.resume()
    both = NextTokens(
        ("old", "new"), pack_i32([0, 0]), pack_i32([1, 0]), pack_i32([8, 5]), pack_i32([99, 3])
    )
    assert journal.receive(StepOutput(2, (), both)) == StepOutput(
        2,
        (
            SequenceOutput("old", 0, 1, pack_i32([8]), 1),
            SequenceOutput("new", 0, 0, pack_i32([5]), 3),
        ),
    )
    assert journal.receive(Retired("old", 0, "stop", 2)) is not None
    step = StepOutput(3, (), NextTokens(("new",), *map(pack_i32, ([0], [1], [6], [3]))))
    assert journal.receive(step) is step
    journal.lose()
    [again] = journal.resume()
    assert isinstance(again, AdmitRequest)
    assert again.outputs == (pack_i32([5, 6]),)


def test_a_changed_request_goes_on_as_it_was_changed() -> None:
    """A child that had ended may have more outputs than max_tokens is now."""
    journal = Journal()
    sampling = SamplingParams(seed=1, max_tokens=9, n=2)
    reasoning = ReasoningIds(((1,),), ((2,),))
    journal.admit(AdmitRequest("r", pack_i32([5]), sampling, reasoning=reasoning), is_sent=True)
    outputs = [SequenceOutput("r", 0, 0, pack_i32([7] * 8), 0), SequenceOutput("r", 1, 0, b"", 0)]
    journal.receive(StepOutput(1, tuple(outputs)))
    journal.receive(Retired("r", 0, "stop", 8))
    states = (SequenceState(1, "running", 1, 0, 4, 2),)
    refused = Amend("r", 1, max_tokens=99)
    journal.receive(Amended(refused, states, ErrorInfo("no", "t", "c", 400)))
    journal.receive(Amended(Amend("r", 2, ends_reasoning=True, max_tokens=4, priority=2), states))
    journal.receive(Amended(Amend("other", 3, max_tokens=1), states))
    assert not journal.is_waiting("r")
    journal.lose()
    assert journal.is_waiting("r")
    admit = journal.resume()[0]
    assert isinstance(admit, AdmitRequest)
    assert (admit.sampling.max_tokens, admit.priority) == (4, 2)
    assert admit.reasoning == msgspec.structs.replace(reasoning, max_tokens=0)
    assert admit.outputs == (pack_i32([7] * 4), b"")
    assert not journal.is_waiting("r")
