"""The official client against a started server with the bundled model.

The server computes in float64, so that a text is the same whatever runs beside it; what the model
says is of no importance.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.slow

KEY = "sesame"
MODEL = "aserve-tiny"
QUIET = ("--dtype", "float64", "--num-pages", "2000", "--log-level", "error", "--public-metrics")
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tell me a story about a fox."},
]
# An answer of a known length, that no chance ends early.
FIXED = {"ignore_eos": True}
SETTLE_S = 20.0
MIB = 1 << 20


@pytest.fixture(scope="module", params=["1", "2"], ids=["one-process", "two-processes"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(*QUIET, "--api-key", KEY, "--processes", request.param) as started:
        yield started


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(server) as opened:
        yield opened


def client_of(server: ServerProcess, *, api_key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.address}/v1", api_key=api_key, max_retries=0, timeout=60
    )


async def complete(client: openai.AsyncOpenAI, prompt: Any = "Once", **fields: Any) -> Completion:
    extra = FIXED | fields.pop("extra_body", {})
    return await client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **fields)


async def events_of(
    client: openai.AsyncOpenAI, prompt: str = "Once", **fields: Any
) -> list[Completion]:
    extra = FIXED | fields.pop("extra_body", {})
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, stream=True, extra_body=extra, **fields
    )
    return [event async for event in stream]


def text_of(events: list[Completion], index: int = 0) -> str:
    choices = [choice for event in events for choice in event.choices]
    return "".join(choice.text for choice in choices if choice.index == index)


def seed_of(answer: Any) -> int:
    seed = (answer.model_extra or {})["seed"]
    assert isinstance(seed, int)
    return seed


# ------------------------------------------------------------ answers


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == [MODEL]


async def test_a_streamed_chat_is_the_unstreamed_one(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 30, "seed": 4}
    whole = await client.chat.completions.create(**fields)
    stream = await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    events: list[ChatCompletionChunk] = [event async for event in stream]
    *deltas, last = events
    assert deltas[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in deltas)
    assert text == whole.choices[0].message.content
    assert deltas[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(event.usage is None for event in deltas)
    assert last.choices == []
    assert last.usage is not None
    # The prompt's whole pages are in the cache by then.
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert {event.id for event in events} == {events[0].id}


async def test_without_asking_a_stream_has_no_usage_and_every_event_a_choice(
    client: openai.AsyncOpenAI,
) -> None:
    events = await events_of(client, max_tokens=12)
    assert all(len(event.choices) == 1 and event.usage is None for event in events)
    assert [event.choices[0].finish_reason for event in events[-2:]] == [None, "length"]


async def test_the_second_time_the_prompt_comes_from_the_cache(client: openai.AsyncOpenAI) -> None:
    prompt = list(range(300, 350))
    first = await complete(client, prompt, max_tokens=3)
    second = await complete(client, prompt, max_tokens=3)
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens == second.usage.prompt_tokens == 50
    assert first.usage.completion_tokens == 3
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == 48


async def test_a_seed_is_reported_and_gives_the_same_answer_again(
    client: openai.AsyncOpenAI,
) -> None:
    first = await complete(client, max_tokens=24)
    other = await complete(client, max_tokens=24)
    assert seed_of(first) != seed_of(other)
    events = await events_of(client, max_tokens=24, seed=seed_of(first))
    assert text_of(events) == first.choices[0].text
    assert seed_of(events[-1]) == seed_of(first)


async def test_choices_come_with_their_numbers_and_again_from_the_seed(
    client: openai.AsyncOpenAI,
) -> None:
    fields: dict[str, Any] = {"n": 3, "max_tokens": 24, "temperature": 1.5, "seed": 8}
    whole = await complete(client, **fields)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    events = await events_of(client, **fields)
    assert [text_of(events, index) for index in range(3)] == texts
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3 * 24


async def test_several_prompts_are_answered_in_their_order(client: openai.AsyncOpenAI) -> None:
    prompts = ["Once", "fox=12\nfox=", "The"]
    together = await complete(client, prompts, max_tokens=8, temperature=0)
    alone = [await complete(client, prompt, max_tokens=8, temperature=0) for prompt in prompts]
    assert [choice.text for choice in together.choices] == [each.choices[0].text for each in alone]


@pytest.mark.parametrize("cut", [1, 9, 31])
async def test_a_stop_string_cuts_streamed_and_unstreamed_text_alike(
    client: openai.AsyncOpenAI, cut: int
) -> None:
    free = (await complete(client, max_tokens=40, seed=3)).choices[0].text
    stop = free[cut : cut + 4]
    whole = await complete(client, max_tokens=40, seed=3, stop=["never said", stop])
    events = await events_of(client, max_tokens=40, seed=3, stop=["never said", stop])
    (choice,) = whole.choices
    assert choice.text == free[: free.index(stop)] == text_of(events)
    assert choice.finish_reason == events[-1].choices[0].finish_reason == "stop"
    assert (choice.model_extra or {})["stop_reason"] == stop
    assert whole.usage is not None
    assert whole.usage.completion_tokens < 40


async def test_logprobs_of_completions_spell_the_text(client: openai.AsyncOpenAI) -> None:
    whole = await complete(client, max_tokens=20, temperature=0, logprobs=2)
    (choice,) = whole.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    for chosen, top in zip(
        choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert chosen == max(top.values())
    events = await events_of(client, max_tokens=20, temperature=0, logprobs=2)
    parts = [event.choices[0].logprobs for event in events]
    assert [token for part in parts if part for token in part.tokens or ()] == (
        choice.logprobs.tokens
    )


async def test_logprobs_of_chats_spell_the_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_completion_tokens=12,
        logprobs=True,
        top_logprobs=3,
        extra_body=FIXED,
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert len(entries) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    spelled = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert (choice.message.content or "") in spelled.decode("utf-8", "replace")


# ------------------------------------------------------------ refusals


async def test_a_wrong_key_is_401_and_no_key_opens_only_probes(server: ServerProcess) -> None:
    async with client_of(server, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await complete(client)
    assert caught.value.code == "invalid_api_key"
    assert server.get("/health") == b'{"status":"ready"}'


async def test_an_unknown_model_is_404(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as caught:
        await client.completions.create(model="gpt-9", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": 3}, "decimal_above_max_value", "temperature"),
        ({"max_tokens": 4000}, "context_length_exceeded", None),
        ({"prompt": "long " * 3000}, "context_length_exceeded", None),
        ({"prompt": [5000]}, None, None),
        ({"logprobs": 21}, "integer_above_max_value", "logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_served_is_400_streamed_or_not(
    client: openai.AsyncOpenAI,
    fields: dict[str, Any],
    code: str | None,
    param: str | None,
    stream: bool,
) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "a", "stream": stream} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**body)
    if code is not None:
        assert caught.value.code == code
    if param is not None:
        assert caught.value.param == param


# ------------------------------------------------------------ crowds


async def test_200_streams_at_once_each_get_their_own_answer(client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        return text_of(await events_of(client, f"Once {seed}", max_tokens=30, seed=seed))

    together = await asyncio.gather(*map(ask, range(200)))
    assert together[::40] == [await ask(seed) for seed in range(0, 200, 40)]
    assert len(set(together)) > 190


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_clients_that_go_away_leave_nothing_behind(processes: str) -> None:
    """Half of them in the middle of a stream, the others while they wait for the whole answer. KV
    becomes resident as it is written: of few pages all are, before memory is looked at."""
    options = (*QUIET, "--num-pages", "200", "--api-key", KEY, "--processes", processes)
    with ServerProcess(*options) as server:
        async with client_of(server) as client:
            for _ in range(3):
                await leave_early(client)
                await settled(server)
            before = server.memory_bytes()
            for _ in range(3):
                await leave_early(client)
                await settled(server)
            assert server.memory_bytes() - before < 24 * MIB
            text = (await complete(client, max_tokens=5)).choices[0].text
            assert text


async def leave_early(client: openai.AsyncOpenAI) -> None:
    async def stream(seed: int) -> None:
        events = await client.completions.create(
            model=MODEL, prompt=f"{seed}", stream=True, max_tokens=800, seed=seed, extra_body=FIXED
        )
        for _ in range(3):
            await anext(events)
        await events.close()

    async def wait(seed: int) -> None:
        with pytest.raises(openai.APITimeoutError):
            await complete(client, f"{seed}", max_tokens=1000, n=2, timeout=0.3)

    await asyncio.gather(*map(stream, range(40)), *map(wait, range(40)))


async def settled(server: ServerProcess) -> None:
    """Returns once every gauge of work is back at 0."""
    names = {"requests_in_flight", "sequences_running", "sequences_waiting", "kv_pages_used"}
    await until(lambda: not any(metric(server, f"aserve_{name}") for name in names))


async def until(is_so: Callable[[], bool]) -> None:
    """Another process says nothing by itself: it has to be asked again and again."""
    async with asyncio.timeout(SETTLE_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def metric(server: ServerProcess, name: str) -> float:
    lines = server.get("/metrics").decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.split()[1])


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_full_queue_is_429_with_a_time_to_retry_and_sigterm_ends_every_stream(
    processes: str,
) -> None:
    options = (
        *QUIET,
        "--processes",
        processes,
        "--max-num-seqs",
        "2",
        "--max-queue",
        "3",
        "--drain-timeout",
        "0.3",
    )
    with ServerProcess(*options) as server:
        async with client_of(server) as client:
            streams = [asyncio.ensure_future(outcome(client)) for _ in range(2)]
            await until(lambda: metric(server, "aserve_sequences_running") == 2)
            streams += [asyncio.ensure_future(outcome(client)) for _ in range(2)]
            await until(lambda: metric(server, "aserve_sequences_waiting") == 2)
            # The third place in the queue stays free for other clients.
            with pytest.raises(openai.RateLimitError) as caught:
                await complete(client, max_tokens=5)
            assert caught.value.code == "queue_full"
            assert float(caught.value.response.headers["Retry-After"]) > 0
            code, took_s = await asyncio.to_thread(server.end, signal.SIGTERM)
            assert code == 0
            assert took_s < 5
            assert await asyncio.gather(*streams) == ["server_draining"] * 4


async def outcome(client: openai.AsyncOpenAI) -> str | None:
    """How one long stream ends: its finish reason, or its error's code."""
    try:
        events = await events_of(client, "a", max_tokens=1000)
    except openai.APIError as error:
        return error.code
    return events[-1].choices[0].finish_reason
