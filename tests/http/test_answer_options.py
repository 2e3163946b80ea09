"""What a client may ask of the form of its answer, on both endpoints and streamed or not."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from aserve.messages.base import array_i32
from tests.fakes.echo_engine import MAX_MODEL_LEN, EchoEngine

PATHS = ("completions", "chat/completions")
TEXT = "hello 한국어 🚀 stop sign <mark>"


async def whole(web: aiohttp.ClientSession, path: str, **fields: Any) -> dict[str, Any]:
    async with web.post(f"/v1/{path}", json=body_of(path, fields)) as answer:
        assert answer.status == 200, await answer.text()
        body: dict[str, Any] = await answer.json()
        return body


async def events(
    web: aiohttp.ClientSession, path: str, **fields: Any
) -> AsyncIterator[dict[str, Any]]:
    body = {"stream": True, "stream_options": {"include_usage": True}, **body_of(path, fields)}
    async with web.post(f"/v1/{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    text = fields.pop("text", TEXT)
    if path == "completions":
        return {"prompt": text, "max_tokens": 100, **fields}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 100, **fields}


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.parametrize("path", PATHS)
async def test_token_ids_are_those_of_the_engine(
    web: aiohttp.ClientSession, echo: EchoEngine, path: str
) -> None:
    answer = await whole(web, path, return_token_ids=True, n=2)
    (admitted,) = echo.scheduler.admitted
    prompt_ids = array_i32(admitted.prompt_ids).tolist()
    owner = answer["choices"][0] if path == "completions" else answer
    assert owner["prompt_token_ids"] == prompt_ids
    for choice in answer["choices"]:
        turn = choice["index"]  # the echo turns the prompt by the child's number
        expected = prompt_ids[turn:] + prompt_ids[:turn] + [*admitted.end_ids]
        assert choice["token_ids"] == expected
    assert (
        sum(len(c["token_ids"]) for c in answer["choices"]) == answer["usage"]["completion_tokens"]
    )


@pytest.mark.parametrize("path", PATHS)
async def test_streamed_token_ids_are_those_of_the_whole_answer(
    web: aiohttp.ClientSession, path: str
) -> None:
    expected = await whole(web, path, return_token_ids=True, stop="stop")
    chunks = [chunk async for chunk in events(web, path, return_token_ids=True, stop="stop")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    token_ids = [choice.get("token_ids", []) for choice in choices]
    assert list(itertools.chain(*token_ids)) == expected["choices"][0]["token_ids"]
    token_to_row = [*choices, *chunks]
    prompts = [owner["prompt_token_ids"] for owner in token_to_row if "prompt_token_ids" in owner]
    owner = expected["choices"][0] if path == "completions" else expected
    assert prompts == [owner["prompt_token_ids"]], "once, in the first chunk"


@pytest.mark.parametrize("path", PATHS)
async def test_token_ids_are_returned_only_on_request(
    web: aiohttp.ClientSession, path: str
) -> None:
    assert "token_ids" not in json.dumps(await whole(web, path))
    assert "token_ids" not in json.dumps([chunk async for chunk in events(web, path)])


@pytest.mark.parametrize("path", PATHS)
async def test_usage_on_every_chunk_grows_to_that_of_the_whole_answer(
    web: aiohttp.ClientSession, path: str
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [chunk async for chunk in events(web, path, n=2, stream_options=options)]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    expected = (await whole(web, path, n=2))["usage"]
    assert chunks[-1]["usage"] == chunks[-2]["usage"] == expected


@pytest.mark.parametrize("path", PATHS)
async def test_a_stop_string_is_shown_on_request(web: aiohttp.ClientSession, path: str) -> None:
    fields = {"stop": "sto", "include_stop_str_in_output": True}
    answer = await whole(web, path, **fields)
    choice = answer["choices"][0]
    assert text_of(choice).endswith("hello 한국어 🚀 sto")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "sto")
    streamed = [
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        async for chunk in events(web, path, **fields)
        for choice in chunk["choices"]
    ]
    assert "".join(streamed) == text_of(choice)


async def test_special_tokens_are_shown_on_request(web: aiohttp.ClientSession) -> None:
    """The one that ends the answer is shown where what ends it is shown. In a chat's messages such
    a text would be text, and nothing to echo as a token.
    """
    path = "completions"
    text = "a<|eos|>b"
    fields = {"text": text, "ignore_eos": True}
    assert "ab" in text_of((await whole(web, path, **fields))["choices"][0])
    shown = await whole(web, path, skip_special_tokens=False, **fields)
    assert text in text_of(shown["choices"][0])
    ended = await whole(web, path, text=text, skip_special_tokens=False)
    assert text_of(ended["choices"][0]).endswith("a")
    both = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    with_end = await whole(web, path, text=text, **both)
    assert text_of(with_end["choices"][0]).endswith("a<|eos|>")


@pytest.mark.parametrize("path", PATHS)
async def test_a_salt_is_the_namespace_of_the_cache(
    web: aiohttp.ClientSession, echo: EchoEngine, path: str
) -> None:
    for salt in ("mine", None):
        await whole(web, path, cache_salt=salt)
    assert [request.namespace for request in echo.scheduler.admitted] == ["mine", ""]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("keep", "max_tokens", "expected"),
    [(5, 100, 5), (10_000, 1, 600), (-1, 100, MAX_MODEL_LEN - 100), (-1, None, None)],
)
async def test_a_truncated_prompt_keeps_its_end(
    web: aiohttp.ClientSession,
    echo: EchoEngine,
    path: str,
    keep: int,
    max_tokens: int | None,
    expected: int | None,
) -> None:
    text = "".join(chr(ord("a") + i % 23) for i in range(600))
    fields = {"text": text, "max_tokens": max_tokens, "truncate_prompt_tokens": keep}
    async with web.post(f"/v1/{path}", json=body_of(path, fields)) as answer:
        if keep == 10_000:
            assert (await answer.json())["error"]["code"] == "context_length_exceeded"
            return
        assert answer.status == 200, await answer.text()
    if expected is None:  # a completion has 16 tokens then, a chat the rest of the context
        expected = MAX_MODEL_LEN - (16 if path == "completions" else 1)
    (admitted,) = echo.scheduler.admitted
    ids = array_i32(admitted.prompt_ids).tolist()
    assert len(ids) == expected
    ending = text if path == "completions" else f"u:{text};"
    assert ending.endswith(echo.tokenizer.decode(ids))


async def test_the_best_of_many_are_the_likeliest_per_token(
    web: aiohttp.ClientSession, echo: EchoEngine
) -> None:
    """Child i of the echo says the prompt turned by i, here up to the z. By their sums the short
    ones would win; of the empty one nothing is known.
    """
    echo.scheduler.logprob_of = lambda child: -1.0 - 0.1 * child
    asked = {"text": ["uvz", "vwxyz"], "n": 2, "best_of": 5, "stop": "z", "max_tokens": 4}
    answer = await whole(web, "completions", **asked)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["uv", "v", "vwxy", "wxy"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    kept = [2, 1, 0, 2, 2, 4, 3, 2, 1, 0]  # of all ten
    assert answer["usage"]["completion_tokens"] == sum(kept)
    assert answer["usage"]["prompt_tokens"] == 8
