"""What a client may ask of the form of its answer, on both endpoints and streamed or not."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from aserve.messages.base import array_i32
from aserve.messages.requests import SamplingParams
from aserve.text.defaults import GenerationDefaults
from tests.fakes.echo_engine import MAX_MODEL_LEN, EchoEngine
from tests.http.asking import ask, complete, prompts, told

BOTH = pytest.mark.parametrize("path", ["completions", "chat/completions"])
TEXT = "hello 한국어 🚀 stop sign <mark>"


def body_of(path: str, text: str = TEXT, **fields: Any) -> dict[str, Any]:
    is_chat = path == "chat/completions"
    prompt = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    return {**prompt, "max_tokens": 100, **fields}


async def whole(echo: EchoEngine, path: str, **fields: Any) -> Any:
    return await told(echo, f"/v1/{path}", body_of(path, **fields))


async def streamed(echo: EchoEngine, path: str, **fields: Any) -> list[dict[str, Any]]:
    fields.setdefault("stream_options", {"include_usage": True})
    return (await ask(echo, f"/v1/{path}", body_of(path, stream=True, **fields))).chunks


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@BOTH
async def test_token_ids_whole_and_streamed_are_those_of_the_engine(
    echo: EchoEngine, path: str
) -> None:
    fields = {"return_token_ids": True, "n": 2, "stop": "stop"}
    answer = await whole(echo, path, **fields)
    (admitted,) = echo.scheduler.admitted
    prompt_ids = array_i32(admitted.prompt_ids).tolist()
    owner = answer["choices"][0] if path == "completions" else answer
    assert owner["prompt_token_ids"] == prompt_ids
    for choice in answer["choices"]:
        turn = choice["index"]  # the echo turns the prompt by the child's number
        turned = prompt_ids[turn:] + prompt_ids[:turn]
        assert choice["token_ids"] == turned[: len(choice["token_ids"])] != []
    chunks = await streamed(echo, path, **fields)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in answer["choices"]:
        parts = [part.get("token_ids", []) for part in choices if part["index"] == choice["index"]]
        assert list(itertools.chain(*parts)) == choice["token_ids"]
    first = [(chunk, choice) for chunk in chunks for choice in chunk["choices"]]
    owners = [owner for pair in first if pair[1]["index"] == 0 for owner in pair]
    once = [owner["prompt_token_ids"] for owner in owners if "prompt_token_ids" in owner]
    assert once == [prompt_ids], "in the first chunk"


@BOTH
async def test_token_ids_are_returned_only_on_request(echo: EchoEngine, path: str) -> None:
    assert "token_ids" not in json.dumps(await whole(echo, path))
    assert "token_ids" not in json.dumps(await streamed(echo, path))


@BOTH
async def test_usage_on_every_chunk_grows_to_that_of_the_whole_answer(
    echo: EchoEngine, path: str
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await streamed(echo, path, n=2, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    expected = (await whole(echo, path, n=2))["usage"]
    assert chunks[-1]["usage"] == chunks[-2]["usage"] == expected


@BOTH
async def test_events_with_text_are_padded_on_request(echo: EchoEngine, path: str) -> None:
    fields = body_of(path, stream=True, stream_options={"include_obfuscation": True})
    answer = await ask(echo, f"/v1/{path}", fields)
    sizes = {len(e.removeprefix("data: ").encode()) for e in answer.events if "obfuscation" in e}
    assert sizes
    assert {size % 64 for size in sizes} == {0}
    plain = await streamed(echo, path, stream_options={})
    for chunk, other in zip(answer.chunks, plain, strict=True):
        assert chunk["choices"] == other["choices"]


@BOTH
@pytest.mark.parametrize("options", [None, {"include_usage": False}])
async def test_a_server_may_send_the_usage_of_every_stream(
    path: str, options: dict[str, bool] | None
) -> None:
    async with EchoEngine(enable_force_include_usage=True) as echo:
        *chunks, last = await streamed(echo, path, stream_options=options)
        assert last["usage"] == (await whole(echo, path))["usage"]
        assert last["choices"] == []
        assert not any(chunk["usage"] for chunk in chunks)
        each = await streamed(echo, path, stream_options={"continuous_usage_stats": True})
        assert all(chunk["usage"] for chunk in each)


@BOTH
@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
async def test_a_stop_string_is_shown_on_request(echo: EchoEngine, path: str, name: str) -> None:
    fields = {"stop": "sto", name: True}
    choice = (await whole(echo, path, **fields))["choices"][0]
    assert text_of(choice).endswith("hello 한국어 🚀 sto")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "sto")
    parts = [part for chunk in await streamed(echo, path, **fields) for part in chunk["choices"]]
    texts = [part.get("text") or part.get("delta", {}).get("content") or "" for part in parts]
    assert "".join(texts) == text_of(choice)


async def test_special_tokens_are_shown_on_request(echo: EchoEngine) -> None:
    """The one that ends the answer is shown where what ends it is shown. In a chat's messages such
    a text would be text, and nothing to echo as a token.
    """
    shown, with_stop = {"skip_special_tokens": False}, {"include_stop_str_in_output": True}
    for fields, expected in (
        ({"ignore_eos": True}, "ab"),
        ({"ignore_eos": True} | shown, "a<|eos|>b"),
        (shown, "a"),
        (shown | with_stop, "a<|eos|>"),
    ):
        answer = await whole(echo, "completions", text="a<|eos|>b", **fields)
        assert text_of(answer["choices"][0]).removesuffix("<|eos|>" * 2).startswith(expected)


@BOTH
async def test_a_salt_is_the_namespace_of_the_cache(echo: EchoEngine, path: str) -> None:
    for salt in ("mine", None):
        await whole(echo, path, cache_salt=salt)
    assert [request.namespace for request in echo.scheduler.admitted] == ["/mine", ""]


@BOTH
@pytest.mark.parametrize(
    ("kept", "max_tokens", "expected"),
    [(5, 100, 5), (10_000, 1, None), (-1, 100, MAX_MODEL_LEN - 100), (-1, None, MAX_MODEL_LEN)],
)
async def test_a_truncated_prompt_keeps_its_end(
    echo: EchoEngine, path: str, kept: int, max_tokens: int | None, expected: int | None
) -> None:
    text = "".join(chr(ord("a") + i % 23) for i in range(600))
    body = body_of(path, text, max_tokens=max_tokens, truncate_prompt_tokens=kept)
    answer = await ask(echo, f"/v1/{path}", body)
    if expected is None:
        assert answer.error["code"] == "context_length_exceeded"
        return
    if max_tokens is None:  # a completion has 16 tokens then, a chat the rest of the context
        expected -= 16 if path == "completions" else 1
    assert answer.status == 200, answer.text
    (prompt,) = prompts(echo)
    assert len(echo.scheduler.admitted[0].prompt_ids) == 4 * expected
    assert (text if path == "completions" else f"u:{text};").endswith(prompt)


async def test_the_best_of_many_are_the_likeliest_per_token(echo: EchoEngine) -> None:
    """Child i of the echo says the prompt turned by i, here up to the z. By their sums the short
    ones would win; of the empty one nothing is known.
    """
    echo.scheduler.logprob_of = lambda child: -1.0 - 0.1 * child
    asked = {"prompt": ["uvz", "vwxyz"], "n": 2, "best_of": 5, "stop": "z", "max_tokens": 4}
    answer = await told(echo, "/v1/completions", asked)
    choices = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert choices == [(0, "uv"), (1, "v"), (2, "vwxy"), (3, "wxy")]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    kept = [2, 1, 0, 2, 2, 4, 3, 2, 1, 0]  # of all ten
    usage = answer["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (sum(kept), 8)


DEFAULTS = GenerationDefaults(
    temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1
)
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
RECOMMENDED = {name: getattr(DEFAULTS, name) for name in NAMES}
CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}


def sampled(echo: EchoEngine) -> dict[str, float]:
    sampling: SamplingParams = echo.scheduler.admitted[-1].sampling
    return {name: getattr(sampling, name) for name in RECOMMENDED}


async def test_the_models_defaults_replace_missing_fields(echo: EchoEngine) -> None:
    echo.state.defaults = DEFAULTS
    await echo.client.chat.completions.create(**CHAT)
    assert sampled(echo) == RECOMMENDED
    await complete(echo, "hi")
    assert sampled(echo) == RECOMMENDED
    await echo.client.responses.create(model="echo", input="hi")
    assert sampled(echo) == RECOMMENDED


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 0, 0.0),
        ("temperature", None, 0.6),
        ("top_p", 0.5, 0.5),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("min_p", 0, 0.0),
        ("repetition_penalty", 1, 1.0),
    ],
)
async def test_the_clients_fields_win_and_null_counts_as_missing(
    echo: EchoEngine, name: str, value: float, expected: float
) -> None:
    echo.state.defaults = DEFAULTS
    await echo.client.chat.completions.create(**CHAT, extra_body={name: value})
    assert sampled(echo) == RECOMMENDED | {name: expected}
