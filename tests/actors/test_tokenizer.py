"""The tokenizer actor: order, refusals, long texts in a thread, cancels behind their request."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aserve.actors.admission import TokenizeQueue
from aserve.actors.tokenizer import LONG_TEXT, NUM_THREADS, TokenizerActor
from aserve.channel import Channel
from aserve.errors import ExpectedWait
from aserve.messages.base import array_i32
from aserve.messages.output import DetokenizerEvent, Refused
from aserve.messages.requests import (
    AdmitRequest,
    Cancel,
    ChatPrompt,
    EngineEvent,
    GenerateRequest,
    OpenText,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenizerEvent,
    TokenPrompt,
)
from aserve.picture import PictureSource
from aserve.text.lengths import PromptLimits
from aserve.text.prompt import Prepared, PromptEncoder
from tests.actors.alone import alone, received
from tests.fakes.packed_channel import PackedChannel
from tests.text.vocabularies import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
LIMITS = PromptLimits(max_model_len=5000, vocab_size=TOKENIZER.vocab_size)
LONG = TextPrompt("hello " * LONG_TEXT)


class GatedEncoder(PromptEncoder):
    """Long prompts wait in their thread until the gate opens."""

    __slots__ = ("gate", "prepared")

    def __init__(self) -> None:
        super().__init__(TOKENIZER, template=None, limits=LIMITS)
        self.gate = threading.Event()
        self.prepared: list[str] = []

    def prepare(self, request: GenerateRequest) -> Prepared:
        self.prepared.append(request.request_id)
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60)
        return super().prepare(request)


class Bench:
    """The actor between two inboxes that nobody else reads."""

    def __init__(self, max_chars: int = 1 << 20) -> None:
        self.encoder = GatedEncoder()
        self.text: Channel[DetokenizerEvent] = PackedChannel(DetokenizerEvent)
        self.engine: Channel[EngineEvent] = PackedChannel(EngineEvent)
        self.actor = TokenizerActor(
            self.encoder,
            detokenizer=self.text,
            engine=self.engine,
            queue=TokenizeQueue(max_requests=4, max_chars=max_chars),
        )
        self.actor.inbox = PackedChannel(TokenizerEvent)

    def send(
        self, request_id: str, prompt: Prompt, *, timeout_s: float | None = None, client: str = ""
    ) -> None:
        sampling = SamplingParams(seed=1)
        request = GenerateRequest(request_id, prompt, sampling, timeout_s=timeout_s, client=client)
        self.actor.inbox.send(request)

    async def next_text(self, count: int = 1) -> list[DetokenizerEvent]:
        return await received(self.text, count)

    async def refused(self) -> Refused:
        (event,) = await self.next_text()
        assert isinstance(event, Refused)
        return event

    async def next_admitted(self, count: int = 1) -> list[EngineEvent]:
        return await received(self.engine, count)


@asynccontextmanager
async def running(**options: int) -> AsyncIterator[Bench]:
    bench = Bench(**options)
    async with alone(bench.actor):
        yield bench
        bench.encoder.gate.set()


def names(events: list[DetokenizerEvent] | list[EngineEvent]) -> list[tuple[str, str]]:
    named = (AdmitRequest, Cancel, OpenText, Refused)
    return [(type(e).__name__, e.request_id) for e in events if isinstance(e, named)]


async def test_short_requests_go_on_in_order_of_arrival_and_a_cancel_behind_its_request() -> None:
    async with running() as bench:
        for i in range(3):
            bench.send(f"r{i}", TokenPrompt((1, 2, i)))
        bench.actor.inbox.send(Cancel("r1", None, 0, "cancelled"))
        assert names(await bench.next_text()) == [("OpenText", f"r{i}") for i in range(3)]
        admitted = await bench.next_admitted()
        expected = [("AdmitRequest", f"r{i}") for i in range(3)]
        assert names(admitted) == [*expected, ("Cancel", "r1")]
        assert isinstance(admitted[2], AdmitRequest)
        assert array_i32(admitted[2].prompt_ids).tolist() == [1, 2, 2]


async def test_a_refused_request_ends_at_once_and_never_reaches_the_engine() -> None:
    async with running() as bench:
        bench.send("empty", TextPrompt(""))
        bench.send("chat", ChatPrompt(b'[{"role": "user", "content": "a"}]'))
        bench.send("ids", TokenPrompt((1, 10_000)))
        refused = await bench.next_text()
        assert names(refused) == [("Refused", "empty"), ("Refused", "chat"), ("Refused", "ids")]
        codes = [event.error.code for event in refused if isinstance(event, Refused)]
        assert codes == ["empty_prompt", "no_chat_template", "token_id_out_of_range"]
        assert len(bench.engine) == 0


async def test_a_long_text_delays_nobody_behind_it_and_gives_the_same_ids() -> None:
    """Many bad words are as long as a text."""
    words = SamplingParams(seed=1, bad_words=("word",) * 30)
    async with running() as bench:
        bench.send("long", LONG)
        bench.actor.inbox.send(GenerateRequest("words", TextPrompt("a"), words))
        bench.send("short", TextPrompt("hello"))
        assert names(await bench.next_text()) == [("OpenText", "short")]
        assert names(await bench.next_admitted()) == [("AdmitRequest", "short")]
        bench.encoder.gate.set()
        late = [event for event in await bench.next_admitted(2) if isinstance(event, AdmitRequest)]
        ids = {event.request_id: array_i32(event.prompt_ids).tolist() for event in late}
        assert ids.keys() == {"long", "words"}
        assert ids["long"] == TOKENIZER.encode(LONG.text, with_special=True)


async def test_a_picture_is_never_read_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may be short, and its pixels many."""
    monkeypatch.setattr(GatedEncoder, "check_size", lambda *_: None)
    source = PictureSource("data:image/png;base64,aaaa", "messages[0].content[0]", "image_url")
    async with running() as bench:
        bench.send("picture", ChatPrompt(b"[]", pictures=(source,)))
        bench.send("short", TextPrompt("hello"))
        assert names(await bench.next_text()) == [("OpenText", "short")]


async def test_many_short_texts_at_once_take_no_longer_turn_than_one_that_is_long() -> None:
    async with running() as bench:
        for i in range(3):
            bench.send(f"r{i}", TextPrompt("z" * (LONG_TEXT // 2)))
        bench.send("ids", TokenPrompt((1,) * (LONG_TEXT + 1)))
        assert names(await bench.next_text()) == [("OpenText", "r0"), ("OpenText", "r1")]
        bench.encoder.gate.set()
        assert sorted(names(await bench.next_text(2))) == [("OpenText", "ids"), ("OpenText", "r2")]


@pytest.mark.parametrize("is_in_thread", [True, False])
async def test_a_text_that_does_not_fit_ends_with_one_message(is_in_thread: bool) -> None:
    """Never in a thread where it cannot fit, whatever its tokens are."""
    size = 6000 if is_in_thread else LIMITS.max_model_len * TOKENIZER.bytes_per_token + 1
    async with running() as bench:
        bench.encoder.gate.set()
        bench.send("too long", TextPrompt("z" * size))
        refused = await bench.refused()
        assert refused.error.code == "context_length_exceeded"
        assert bench.encoder.prepared == ["too long"] * is_in_thread


async def test_a_request_cancelled_in_its_thread_is_never_admitted() -> None:
    async with running() as bench:
        bench.send("long", LONG)
        bench.actor.inbox.send(Cancel("long", None, 0, "cancelled"))
        bench.send("after", TokenPrompt((1,)))
        told = await bench.next_text(2)  # the gate is still shut
        assert names(told) == [("OpenText", "after"), ("Refused", "long")]
        assert isinstance(told[1], Refused)
        assert told[1].error.code == "request_cancelled"
        assert names(await bench.next_admitted()) == [("AdmitRequest", "after")]
        assert len(bench.engine) == 0


async def test_work_that_nobody_waits_for_never_gets_a_thread() -> None:
    async with running() as bench:
        for i in range(NUM_THREADS + 2):
            bench.send(f"r{i}", LONG)
        gone = f"r{NUM_THREADS}"  # waits behind those that have the threads
        bench.actor.inbox.send(Cancel(gone, None, 0, "cancelled"))
        assert (await bench.refused()).request_id == gone
        bench.encoder.gate.set()
        await bench.next_text(NUM_THREADS + 1)
        assert gone not in bench.encoder.prepared
        assert len(bench.encoder.prepared) == NUM_THREADS + 1


async def test_clients_get_threads_in_turn() -> None:
    async with running() as bench:
        for i in range(NUM_THREADS + 1):
            bench.send(f"flood{i}", LONG, client="mallory")
        bench.send("other", LONG, client="alice")
        bench.send("short", TextPrompt("a"))
        assert names(await bench.next_text()) == [("OpenText", "short")]  # the others wait
        bench.encoder.gate.set()
        late: list[DetokenizerEvent] = []
        while len(late) < NUM_THREADS + 2:
            late += await bench.next_text()
        order = [each for each in bench.encoder.prepared if each != "short"]
        assert order.index("other") == NUM_THREADS
        assert order[-1] == f"flood{NUM_THREADS}"


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_timeout_acts_while_a_prompt_waits_for_its_thread_or_is_in_it(
    is_first: bool,
) -> None:
    async with running() as bench:
        for i in range(0 if is_first else NUM_THREADS):
            bench.send(f"r{i}", LONG)
        bench.send("late", LONG, timeout_s=0.01)
        refused = await bench.refused()
        assert (refused.request_id, refused.error.code) == ("late", "deadline_exceeded")
        assert refused.error.status == 408
        assert ("late" in bench.encoder.prepared) == is_first


async def test_so_many_prompts_may_wait_for_a_thread_and_no_more() -> None:
    async with running() as bench:
        for i in range(6):
            bench.send(f"r{i}", LONG)
        refused = await bench.next_text()
        assert names(refused) == [("Refused", "r4"), ("Refused", "r5")]
        assert isinstance(refused[0], Refused)
        assert (refused[0].error.status, refused[0].error.code) == (429, "queue_full")
        assert "at most 4 may" in refused[0].error.message
        assert refused[0].error.wait == ExpectedWait(5, None)
        bench.encoder.gate.set()
        await bench.next_text(4)
        bench.send("after", LONG)
        assert names(await bench.next_text()) == [("OpenText", "after")]


async def test_so_many_characters_may_wait_for_a_thread_and_a_long_text_alone() -> None:
    text = TextPrompt("a" * 10_000)
    async with running(max_chars=15_000) as bench:
        bench.send("r0", text)
        bench.send("r1", text)
        refused = await bench.refused()
        assert (refused.request_id, refused.error.code) == ("r1", "queue_full")
        assert "10000 characters" in refused.error.message
        bench.encoder.gate.set()
        assert len(await bench.next_text()) == 1
        bench.send("larger than the queue", TextPrompt("hello " * 3_000))
        ((_, name),) = names(await bench.next_text())
        assert name == "larger than the queue"
        assert "larger than the queue" in bench.encoder.prepared
