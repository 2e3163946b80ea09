"""Prompts on their way back to the client: echoed, scored, or both; prompt token i scores -i."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.fakes.echo_engine import EchoEngine

TEXT = "hello 한국어"


async def test_an_echo_stands_before_each_choice_of_each_prompt(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="echo", prompt=[TEXT, "b"], n=2, max_tokens=2, echo=True
    )
    plain = await client.completions.create(model="echo", prompt=[TEXT, "b"], n=2, max_tokens=2)
    assert [choice.text for choice in answer.choices] == [
        prompt + choice.text
        for prompt, choice in zip([TEXT, TEXT, "b", "b"], plain.choices, strict=True)
    ]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage == plain.usage


async def test_a_prompt_is_scored_without_any_output_as_evaluation_tools_ask(
    client: openai.AsyncOpenAI, echo: EchoEngine
) -> None:
    ids = echo.tokenizer.encode(TEXT, with_special=False)
    answer = await client.completions.create(
        model="echo", prompt=[ids, ids[:1]], max_tokens=0, logprobs=1, echo=True
    )
    scored, single = answer.choices
    assert (scored.text, scored.finish_reason) == (TEXT, "length")
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs == [None, *(-float(i) for i in range(1, len(ids)))]
    assert scored.logprobs.top_logprobs is not None
    assert scored.logprobs.top_logprobs[0] is None
    assert all(scored.logprobs.top_logprobs[1:])
    tokens, offsets = scored.logprobs.tokens or [], scored.logprobs.text_offset or []
    assert len(tokens) == len(offsets) == len(ids)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or TEXT[offset:].startswith(token)
    assert single.logprobs is not None
    assert single.logprobs.token_logprobs == [None]
    assert [request.sampling.prompt_logprobs for request in echo.scheduler.admitted] == [1, 1]


async def test_the_output_follows_the_echo(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="echo", prompt=TEXT, max_tokens=9, logprobs=0, echo=True
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert choice.text.startswith(TEXT + "hello")
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    assert choice.logprobs.top_logprobs is None


@pytest.mark.parametrize("n", [1, 3])
async def test_a_streamed_echo_comes_before_any_output(client: openai.AsyncOpenAI, n: int) -> None:
    """The first child is scored in two runs, while its siblings are ahead of it."""
    stream = await client.completions.create(
        model="echo", prompt=TEXT, max_tokens=3, n=n, logprobs=0, echo=True, stream=True
    )
    parts: dict[int, list[Any]] = {}
    async for event in stream:
        for choice in event.choices:
            assert choice.logprobs is not None
            parts.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs or [])
    num_tokens = len([None, *parts[0]]) - 1
    prompt_len = num_tokens - 3
    for index in range(n):
        assert parts[index][:prompt_len] == [None, *(-float(i) for i in range(1, prompt_len))]
        assert len(parts[index]) == num_tokens


async def test_prompt_logprobs_have_the_shape_that_other_servers_gave_them(
    client: openai.AsyncOpenAI, echo: EchoEngine
) -> None:
    extra = {"prompt_logprobs": 2}
    ids = [64, 65, 66]
    text = await client.completions.create(model="echo", prompt=ids, n=2, extra_body=extra)
    for choice in text.choices:
        assert choice.logprobs is None
        first, second, third = choice.model_dump()["prompt_logprobs"]
        assert first is None
        token = echo.tokenizer.decode([65])
        assert second["65"] == {"logprob": -1.0, "rank": 1, "decoded_token": token}
        assert [score["rank"] for score in third.values()] == [2, 1, 2]
        assert [int(token_id) for token_id in third] == [ids[2], 0, 1]
    chat = await client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "a"}], extra_body=extra
    )
    scores = chat.model_dump()["prompt_logprobs"]
    assert [score is None for score in scores] == [True] + [False] * (len(scores) - 1)
    plain = await client.completions.create(model="echo", prompt=ids)
    assert "prompt_logprobs" not in plain.choices[0].model_dump()


async def test_an_echo_and_prompt_logprobs_each_get_the_alternatives_that_they_asked_for(
    client: openai.AsyncOpenAI, echo: EchoEngine
) -> None:
    answer = await client.completions.create(
        model="echo",
        prompt=TEXT,
        max_tokens=0,
        logprobs=1,
        echo=True,
        extra_body={"prompt_logprobs": 3},
    )
    (choice,) = answer.choices
    assert echo.scheduler.admitted[0].sampling.prompt_logprobs == 3
    assert {len(scores) for scores in choice.model_dump()["prompt_logprobs"][1:]} == {4}
    assert choice.logprobs is not None
    assert {len(top) for top in (choice.logprobs.top_logprobs or [])[1:]} == {2}


async def test_a_truncated_prompt_is_echoed_as_the_model_saw_it(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="echo",
        prompt="abcdef",
        max_tokens=0,
        echo=True,
        extra_body={"truncate_prompt_tokens": 2},
    )
    assert answer.choices[0].text == "ef"
