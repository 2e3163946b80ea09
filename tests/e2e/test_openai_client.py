"""The official client against a server process: what people will do on the first day."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.server_process import ServerProcess

MODEL = "aserve-tiny"
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is 27 plus 15?"},
]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def many(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{server.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def gauge(server: ServerProcess, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", server.get("/metrics").decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_a_streamed_chat_is_the_whole_one_with_the_same_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)


def test_a_seed_gives_the_same_choices_again_and_n_of_them_differ(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", n=4, seed=seed, max_tokens=24, temperature=1
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda item: item.index)]

    assert texts(5) == texts(5)
    assert len(set(texts(5))) > 1
    assert texts(5) != texts(6)


def test_logprobs_name_the_greedy_token_as_the_likeliest(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3, max_tokens=8
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for token in logprobs.content:
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-4)
        assert token.logprob <= 0


def test_a_stop_string_is_not_part_of_the_text(client: openai.OpenAI) -> None:
    def story(stop: str | None) -> tuple[str, str]:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=60, temperature=0, stop=stop
        )
        return answer.choices[0].text, answer.choices[0].finish_reason

    whole, _ = story(None)
    assert "." in whole
    assert story(".") == (whole.partition(".")[0], "stop")


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", max_tokens=99999)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", temperature=9)
    assert caught.value.param == "temperature"


@pytest.mark.slow
async def test_200_streams_at_once_get_what_each_gets_alone(many: openai.AsyncOpenAI) -> None:
    async def story(number: int) -> str:
        stream = await many.completions.create(
            model=MODEL,
            prompt=f"Once upon a time there were {number % 20} hens",
            max_tokens=16,
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    alone = [await story(number) for number in range(20)]
    together = await asyncio.gather(*(story(number) for number in range(200)))
    assert list(together) == [alone[number % 20] for number in range(200)]


@pytest.mark.slow
async def test_clients_that_leave_in_the_middle_leave_nothing_behind(
    server: ServerProcess, many: openai.AsyncOpenAI
) -> None:
    async def leave(number: int) -> None:
        stream = await many.completions.create(
            model=MODEL,
            prompt=f"Once upon a time {number}",
            max_tokens=900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        await stream.close()

    sizes = []
    for _ in range(4):
        await asyncio.gather(*(leave(number) for number in range(40)))
        wait_until_idle(server)
        sizes.append(server.memory_bytes())
    assert sizes[-1] - sizes[0] < 16 << 20
    assert gauge(server, "aserve_steps_failed_total") == 0


def wait_until_idle(server: ServerProcess) -> None:
    """Each look is a round trip, so this is no busy loop of the server's."""
    names = ["requests_in_flight", "sequences_running", "sequences_waiting"]
    names += [f'inbox_messages{{actor="{name}"}}' for name in ("scheduler", "pump", "detokenizer")]
    values = {}
    for _ in range(1000):
        values = {name: gauge(server, re.escape(f"aserve_{name}")) for name in names}
        if not any(values.values()):
            return
    raise AssertionError(f"something is left: {values}")
