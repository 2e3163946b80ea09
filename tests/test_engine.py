"""The embeddable engine: same tokens whichever way they are asked for, and nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from aserve.config import Resolved
from aserve.engine import Engine, GenerationError, PromptLike
from aserve.errors import ClientError, ConfigError, EngineDead, InvalidRequest, ShuttingDown
from aserve.load import Loaded
from aserve.messages.base import pack_i32
from aserve.messages.output import OutputChunk
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.text.load import TextSide
from tests.fakes.executor import SPEC, FakeExecutor
from tests.fakes.packed_channel import PackedEngine
from tests.fakes.toy_device import expected_outputs
from tests.text.vocabularies import byte_level_tokenizer

PROMPT = [5, 6, 7]


class Loader:
    """Loads nothing; keeps the executors that it made."""

    def __init__(self, *, is_manual: bool = False) -> None:
        self.executors: list[FakeExecutor] = []
        self._is_manual = is_manual
        self.make = FakeExecutor

    def __call__(self, resolved: Resolved) -> Loaded:
        limits = {"max_waiting": resolved.scheduler.max_queue}
        spec = msgspec.structs.replace(SPEC, **limits)
        executor = self.make(spec, is_manual=self._is_manual)
        self.executors.append(executor)
        return Loaded(executor, TextSide(byte_level_tokenizer()))


def engine(loader: Loader | None = None, **options: Any) -> Engine:
    return PackedEngine(loader=loader or Loader(), debug_checks=True, **options)


def expected(*, seed: int, max_tokens: int, child: int = 0, n: int = 1) -> list[int]:
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, n=n)
    request = AdmitRequest("a", pack_i32(PROMPT), sampling)
    return expected_outputs(request, child, SPEC)


@contextmanager
def nothing_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(10)
    assert [thread.name for thread in left if thread.is_alive()] == []


async def test_chunks_come_as_they_are_made_and_add_up_to_the_plain_engines_tokens() -> None:
    """And a closed engine leaves no task and closes its executor."""
    loader = Loader()
    before = asyncio.all_tasks()
    async with engine(loader) as running:
        chunks = [
            chunk async for chunk in running.generate(PROMPT, seed=3, max_tokens=6, ignore_eos=True)
        ]
    assert asyncio.all_tasks() == before
    assert [executor.is_closed for executor in loader.executors] == [True]
    assert len(chunks) > 1
    tokens = b"".join(chunk.token_ids for chunk in chunks)
    assert tokens == pack_i32(expected(seed=3, max_tokens=6))
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_who_stops_reading_cancels_the_request() -> None:
    async with engine() as running:
        chunks = running.generate(PROMPT, max_tokens=50, ignore_eos=True)
        await anext(chunks)
        await chunks.aclose()
        text = (await running.answer("other", max_tokens=2)).choices
        assert text
        state = running._frontend
        assert state.gateway.num_open == 0
        ended = state.metrics.registry.get_sample_value(
            "aserve_requests_ended_total", {"outcome": "cancelled", "reason": "cancelled"}
        )
    assert ended == 1


def test_a_plain_program_gets_its_answers_in_order_more_than_rows_and_queue_hold() -> None:
    prompts: list[PromptLike] = [PROMPT, "some text"] * 30
    with nothing_left(), engine(max_queue=4) as running:
        answers = running.generate_sync(prompts, seed=3, max_tokens=4, ignore_eos=True)
        alone = running.generate_sync(["some text"], seed=3, max_tokens=4, ignore_eos=True)
    assert [list(answer.choices[0].token_ids) for answer in answers[::2]] == [
        expected(seed=3, max_tokens=4)
    ] * 30
    assert {answer.text for answer in answers[1::2]} == {alone[0].text}


def test_the_engines_seed_makes_its_answers_repeatable() -> None:
    def seeds(seed: int | None) -> list[int]:
        with engine(seed=seed) as running:
            return [answer.seed for answer in running.generate_sync(["a", "b"], max_tokens=1)]

    assert seeds(7) == seeds(7)
    assert len(set(seeds(7))) == 2
    assert seeds(None) != seeds(None)


def test_chunks_can_be_read_without_a_loop_and_left_early() -> None:
    with nothing_left(), engine() as running:
        chunks: list[OutputChunk] = []
        stream = running.stream_sync(PROMPT, seed=3, max_tokens=50, ignore_eos=True)
        for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 2:
                break
        stream.close()  # type: ignore[attr-defined]  # it is a generator
        assert running._frontend.gateway.num_open == 0
    assert b"".join(chunk.token_ids for chunk in chunks)


async def test_the_fields_of_the_http_api_count_here_too() -> None:
    async with engine() as running:
        asked = {"truncate_prompt_tokens": 2, "cache_salt": "mine", "bad_words": ["a"]}
        asked |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
        answer = await running.answer(PROMPT, max_tokens=3, ignore_eos=True, **asked)
        assert answer.choices[0].usage.prompt_tokens == 2
        with pytest.raises(GenerationError, match="nothing could be sampled"):
            await running.answer(PROMPT, allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1)
        with pytest.raises(InvalidRequest, match="surrogate"):
            await running.answer(PROMPT, cache_salt="\ud800")


def test_an_error_in_a_list_is_raised_and_leaves_the_engine_usable() -> None:
    with engine() as running:
        with pytest.raises(GenerationError, match="maximum context length"):
            running.generate_sync(["short", "long " * 200, "short"], max_tokens=2)
        assert running._frontend.gateway.num_open == 0
        assert len(running.generate_sync(["short"], max_tokens=2)) == 1


def test_one_text_is_not_taken_for_a_list_of_letters() -> None:
    with engine() as running, pytest.raises(InvalidRequest, match="list of prompts"):
        running.generate_sync("one text")


def test_an_option_is_checked_before_anything_is_loaded() -> None:
    loader = Loader()
    with pytest.raises(ConfigError, match="page_size"):
        engine(loader, page_sizes=4)
    assert loader.executors == []


async def test_a_model_that_cannot_be_loaded_leaves_nothing_behind() -> None:
    def broken(resolved: Resolved) -> Loaded:
        raise ConfigError("no such model")

    before = asyncio.all_tasks()
    with nothing_left(), pytest.raises(ConfigError, match="no such model"):
        async with Engine(loader=broken):
            pass
    with nothing_left(), pytest.raises(ConfigError, match="no such model"), Engine(loader=broken):
        pass
    assert asyncio.all_tasks() == before


async def test_an_engine_that_was_closed_or_never_entered_says_so() -> None:
    running = engine()
    with pytest.raises(EngineDead):
        await running.answer("text")
    async with running:
        await running.answer("text", max_tokens=1)
    with pytest.raises(ShuttingDown):
        await running.answer("text")
    with pytest.raises(EngineDead):
        running.generate_sync(["text"])


async def test_closing_ends_what_is_still_open_with_an_error() -> None:
    loader = Loader(is_manual=True)
    running = engine(loader)
    await running.__aenter__()
    answer = asyncio.ensure_future(running.answer(PROMPT, max_tokens=5))
    await loader.executors[0].until_given(1)
    await running.__aexit__(None, None, None)
    with pytest.raises(GenerationError) as caught:
        await answer
    assert caught.value.reason.code == "server_draining"
    registry = running._frontend.metrics.registry
    assert registry.get_sample_value("aserve_requests_in_flight") == 0


async def test_an_engine_whose_first_step_fails_closes_what_it_had_loaded() -> None:
    loader = Loader()

    class Broken(FakeExecutor):
        async def warm_up(self) -> None:
            raise ConfigError("out of memory")

    loader.make = Broken
    before = asyncio.all_tasks()
    with pytest.raises(ConfigError, match="out of memory"):
        async with engine(loader):
            pass
    assert asyncio.all_tasks() == before
    assert [executor.is_closed for executor in loader.executors] == [True]


def test_a_plain_program_gets_embeddings_in_the_order_of_its_prompts() -> None:
    prompts: list[PromptLike] = [[1, 2, 3], [4, 5], [1, 2, 3]] * 8
    with nothing_left(), engine(max_queue=4) as running:
        vectors = [tuple(vector.tolist()) for vector in running.embed_sync(prompts)]
    assert vectors == vectors[:3] * 8
    assert vectors[0] == vectors[2] != vectors[1]


WRONG_PROMPTS: list[tuple[Any, str]] = [
    (["hello", "world"], "several prompts"),
    ([[1, 2], [3]], "several prompts"),
    ([], "empty"),
    ([1, "a"], "several prompts"),
    (["a", {"role": "user", "content": "b"}], "several prompts"),
    ([{"content": "a"}], "role"),
    ([{"role": 3, "content": "a"}], "role"),
    ([{"role": "user", "content": object()}], "messages"),
    ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ("\ud800", "lone surrogate"),
    ("long " * 200, "maximum context length"),
    ([True, 2**70], "out of range"),
    (None, "NoneType"),
    (3.5, "float"),
    (b"bytes", "bytes"),
    ({"role": "user"}, "dict"),
]
WRONG_FIELDS: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "\ud800"}},
    {"structured_outputs": {"choice": ["a", "\udfff"]}},
    {"structured_outputs": {"json": {"\ud800": 1}}},
    {"response_format": {"type": "\ud800"}},
    {"chat_template_kwargs": {"a": {"b": object()}}},
    {"chat_template_kwargs": {"a": "\ud800"}},
    {"cache_salt": "\ud800"},
    {"stop": "\ud800"},
    {"stream": True},
    {"temperature": object()},
    {"temperatur": 1},
    {"temperature": 3},
    {"logprobs": 21},
    {"\ud800": 1},
]


async def test_what_is_wrong_is_refused_by_what_is_wrong_with_it_and_the_engine_goes_on() -> None:
    async with engine() as running:
        for prompt, what in WRONG_PROMPTS:
            for ask in (running.answer, running.embed):
                with pytest.raises((ClientError, GenerationError), match=what) as caught:
                    await ask(prompt)
                assert caught.value.info().status == 400
        for fields in WRONG_FIELDS:
            with pytest.raises(ClientError) as refused:
                await running.answer([{"role": "user", "content": "a"}], **fields)
            msgspec.json.encode(refused.value.info())  # what it says can be sent
        with pytest.raises(ClientError, match="temperature"):
            await running.answer("text", temperatur=1)
        answer = await running.answer(PROMPT, seed=3, max_tokens=2, ignore_eos=True)
        assert list(answer.choices[0].token_ids) == expected(seed=3, max_tokens=2)
        assert running._frontend.gateway.num_open == 0


async def test_what_cannot_be_submitted_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine() as running:

        def broken(request: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(running._frontend.metrics, "received", broken)
            with pytest.raises(MemoryError):
                await running.answer(PROMPT)
        assert running._frontend.gateway.num_open == 0
        await running.answer(PROMPT, max_tokens=2)
