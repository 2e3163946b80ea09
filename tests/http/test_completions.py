"""POST /v1/completions through the official client; the engine answers with the prompt."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp
import openai
import pytest
from openai.types import Completion

from aserve.http.openai.completion_logprobs import top_of
from aserve.messages.output import TokenLogprob, TopLogprob
from tests.fakes.echo_engine import EchoEngine

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
TEXT = "hello 한국어 🚀 stop sign <mark>"


async def streamed(client: openai.AsyncOpenAI, **body: Any) -> list[Completion]:
    stream = await client.completions.create(
        model="echo", stream=True, stream_options={"include_usage": True}, **body
    )
    return [chunk async for chunk in stream]


def gather(chunks: list[Completion], index: int) -> dict[str, Any]:
    """What a client has of one choice when its stream is over, in the shape of the whole one."""
    parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    logprobs = [part.logprobs.model_dump() for part in parts if part.logprobs is not None]
    return {
        "index": index,
        "text": "".join(part.text for part in parts),
        "logprobs": {key: [x for each in logprobs for x in each[key] or []] for key in LISTS},
        "finish_reason": parts[-1].finish_reason,
    }


BODIES: list[dict[str, Any]] = [
    {"prompt": TEXT, "max_tokens": 3, "echo": True},
    {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": [TEXT, "a"], "max_tokens": 4, "n": 3, "echo": True, "logprobs": 2, "stop": "lo"},
    {"prompt": TEXT, "max_tokens": 100},
    {"prompt": TEXT, "max_tokens": 7, "logprobs": 3},
    {"prompt": TEXT, "max_tokens": 100, "logprobs": 1, "stop": ["sto", "p s"]},
    {"prompt": [TEXT, "again"], "max_tokens": 100, "n": 3, "logprobs": 2},
    {"prompt": [[40, 41, 42], [43]], "max_tokens": 2, "stop": "never"},
]


@pytest.mark.parametrize("body", BODIES)
async def test_streamed_and_whole_answers_are_the_same(
    client: openai.AsyncOpenAI, body: dict[str, Any]
) -> None:
    whole = await client.completions.create(model="echo", **body)
    chunks = await streamed(client, **body)
    assert len(whole.choices) == body.get("n", 1) * (
        len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    )
    for choice in whole.choices:
        expected = choice.model_dump(include={"index", "text", "logprobs", "finish_reason"})
        if expected["logprobs"] is None:
            expected["logprobs"] = {key: [] for key in LISTS}
        assert gather(chunks, choice.index) == expected
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_every_kind_of_prompt_is_answered_in_its_order(client: openai.AsyncOpenAI) -> None:
    texts = await client.completions.create(model="echo", prompt=["one", "two", "three"])
    assert [choice.text for choice in texts.choices] == ["one", "two", "three"]
    token_ids = [[ord(c) - 32 for c in word] for word in ("HI", "YOU")]
    lists = await client.completions.create(model="echo", prompt=token_ids)
    single = await client.completions.create(model="echo", prompt=token_ids[1])
    assert single.choices[0].text == lists.choices[1].text
    assert lists.usage is not None
    assert lists.usage.prompt_tokens == 5


async def test_children_share_one_prompt_in_the_usage(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="echo", prompt=[40, 41, 42], n=4, max_tokens=2)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    assert answer.usage.total_tokens == 11
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 3


async def test_text_offsets_point_at_their_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="echo", prompt=TEXT, max_tokens=100, logprobs=0)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens is not None
    assert offsets is not None
    for token, offset in zip(tokens, offsets, strict=True):
        is_partial = token.startswith("bytes:") or token == "<|eos|>"
        assert is_partial or choice.text[offset:].startswith(token)
    assert choice.logprobs.top_logprobs is None


async def test_a_stop_string_ends_text_logprobs_and_usage_together(
    client: openai.AsyncOpenAI, echo: EchoEngine
) -> None:
    answer = await client.completions.create(
        model="echo", prompt=TEXT, max_tokens=100, logprobs=0, stop=["stop"]
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("hello 한국어 🚀 ", "stop")
    assert choice.model_dump()["stop_reason"] == "stop"
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.tokens or []) == answer.usage.completion_tokens
    assert [cancel.reason for cancel in echo.scheduler.cancels] == ["stop"]


async def test_the_length_limit_has_its_own_finish_reason(client: openai.AsyncOpenAI) -> None:
    short = await client.completions.create(model="echo", prompt=TEXT, max_tokens=2)
    full = await client.completions.create(model="echo", prompt="hello", max_tokens=100)
    assert (short.choices[0].finish_reason, full.choices[0].finish_reason) == ("length", "stop")


async def test_without_max_tokens_sixteen_are_generated(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="echo", prompt="z " * 40)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_max_tokens_may_be_zero(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="echo", prompt=TEXT, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")


async def test_the_seed_is_returned_and_drawn_if_none_was_given(
    client: openai.AsyncOpenAI, echo: EchoEngine
) -> None:
    given = await client.completions.create(model="echo", prompt="a", seed=-5)
    assert given.model_dump()["seed"] == -5
    drawn = [await streamed(client, prompt="a") for _ in range(2)]
    seeds = {chunks[-1].model_dump()["seed"] for chunks in drawn}
    assert len(seeds) == 2
    assert seeds == {request.sampling.seed for request in echo.scheduler.admitted[1:]}


async def test_sampling_fields_reach_the_engine(
    client: openai.AsyncOpenAI, echo: EchoEngine
) -> None:
    started_s = time.monotonic()
    await client.completions.create(
        model="parrot",
        prompt="a",
        temperature=0,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"7": -100},
        stop="x",
        user="somebody",
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "allowed_token_ids": [40, 41],
            "bad_words": ["AB"],
            "priority": -3,
            "timeout": 2.5,
            "metadata": {"any": "thing"},
        },
    )
    (admitted,) = echo.scheduler.admitted
    sampling = admitted.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0,
        0.5,
        0,
        0.1,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.5, 2)
    assert (sampling.logit_bias, sampling.stop) == (((7, -100.0),), ("x",))
    assert (sampling.allowed_token_ids, sampling.bad_words) == ((40, 41), ("AB",))
    assert (admitted.end_ids, admitted.priority) == ((9,), -3)
    assert admitted.deadline_s is not None
    assert 0 < admitted.deadline_s - started_s - 2.5 < 60


async def test_top_p_zero_means_the_likeliest_token_and_not_none(
    client: openai.AsyncOpenAI, echo: EchoEngine
) -> None:
    await client.completions.create(model="echo", prompt="a", top_p=0)
    assert 0 < echo.scheduler.admitted[0].sampling.top_p < 1e-3


@pytest.mark.parametrize("reports_usage", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_usage_is_null_in_every_chunk_but_the_last_and_absent_where_not_asked_for(
    web: aiohttp.ClientSession, path: str, reports_usage: bool
) -> None:
    body: dict[str, Any] = {"prompt": TEXT, "stream": True}
    body["messages"] = [{"role": "user", "content": TEXT}]
    if reports_usage:
        body["stream_options"] = {"include_usage": True}
    async with web.post(f"/v1/{path}", json=body) as answer:
        lines = (await answer.text()).removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    if reports_usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)


def test_the_chosen_token_is_among_the_alternatives_even_where_it_is_not_one_of_the_best() -> None:
    best = TopLogprob(1, "a", b"a", -0.1)
    entry = TokenLogprob(2, "\ufffd", b"\xed", -5.0, (best,))
    assert top_of(entry, num_top=1) == {"a": -0.1, "bytes:\\xed": -5.0}
    assert top_of(TokenLogprob(1, "a", b"a", -0.1, (best,)), num_top=1) == {"a": -0.1}
