"""A foreign text of one byte per token, streamed in every cut that there is: through the text
actors, the gateway and HTTP, each stream says what the whole answer says.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask

TOKENIZER = load_tokenizer(MODEL_DIR)
TEXT = "中🚀"
NUM_TOKENS = len(TOKENIZER.encode(TEXT, with_special=False)) + 1  # and eos


def every_cut(num_tokens: int) -> Iterator[tuple[int, ...]]:
    """How many tokens come in each step."""
    for num_cuts in range(num_tokens):
        for cuts in itertools.combinations(range(1, num_tokens), num_cuts):
            yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_tokens)))


@pytest.fixture
async def echo() -> AsyncIterator[EchoEngine]:
    async with EchoEngine(tokenizer=TOKENIZER, template="{{ messages[0].content }}") as engine:
        yield engine


async def answer_of(echo: EchoEngine, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, or the one whole answer."""
    prompt = {"prompt": TEXT} if path == "completions" else {"messages": [MESSAGE]}
    body = {**prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True, **fields}
    answer = await ask(echo, f"/v1/{path}", body)
    assert answer.status == 200, answer.text
    return answer.chunks if fields.get("stream") else [answer.json]


MESSAGE = {"role": "user", "content": TEXT}


def texts_of(events: list[dict[str, Any]]) -> list[str]:
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    return [part.get("text") or part.get("content") or "" for part in parts]


def ids_of(events: list[dict[str, Any]]) -> list[int]:
    choices = [choice for event in events for choice in event["choices"]]
    return [token_id for choice in choices for token_id in choice.get("token_ids", [])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "stop"),
    [
        ("completions", None),
        ("completions", "🚀"),
        ("completions", "中🚀"),
        ("chat/completions", "🚀"),
    ],
)
async def test_every_cut_of_the_stream_says_what_the_whole_answer_says(
    echo: EchoEngine, path: str, stop: str | None
) -> None:
    assert len(TEXT.encode()) + 1 == NUM_TOKENS
    expected = await answer_of(echo, path, stop=stop)
    assert texts_of(expected) == [TEXT.removesuffix(stop or "")]
    for runs in every_cut(NUM_TOKENS):
        echo.scheduler.runs = runs
        events = await answer_of(echo, path, stop=stop, stream=True)
        texts = texts_of(events)
        assert "".join(texts) == texts_of(expected)[0], runs
        assert all("\ufffd" not in text for text in texts), runs
        assert ids_of(events) == ids_of(expected), runs


async def test_an_answer_that_ends_inside_a_character_is_the_same_for_every_split(
    echo: EchoEngine,
) -> None:
    num_tokens = NUM_TOKENS - 3  # the rocket lacks its last two bytes
    for runs in every_cut(num_tokens):
        echo.scheduler.runs = runs
        events = await answer_of(echo, "completions", max_tokens=num_tokens, stream=True)
        assert "".join(texts_of(events)) == "中\ufffd", runs
        assert len(ids_of(events)) == num_tokens
