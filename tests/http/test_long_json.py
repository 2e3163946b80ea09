"""JSON in pieces: the bytes are those of the encoder, and no piece of the way is long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.http.long_json import BLOCK_BYTES, JsonEach, JsonList, blocks_of, pieces_of
from aserve.http.openai.answers import logprob_entries
from aserve.messages.scored import TokenLogprob
from tests.fakes.echo_engine import EchoEngine

VALUES = st.recursive(
    st.none() | st.integers(-(2**53), 2**53) | st.text() | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


class Record(msgspec.Struct):
    before: Any
    first: list[Any] | JsonList | JsonEach
    between: Any
    second: list[Any] | JsonList | JsonEach
    after: Any


@given(VALUES, st.lists(st.lists(VALUES, max_size=3), max_size=4), VALUES)
def test_a_record_in_pieces_is_the_record_that_the_encoder_writes(
    value: Any, parts: list[list[Any]], after: Any
) -> None:
    grown = JsonList()
    for part in parts:
        grown.extend(part)
    items = [item for part in parts for item in part]
    inner = Record(value, grown, "\0", JsonList(), after)
    record = Record(value, grown, "\0\\u0000", JsonEach(lambda: [inner, *items]), after)
    inner_plain = Record(value, items, "\0", [], after)
    plain = Record(value, items, "\0\\u0000", [inner_plain, *items], after)
    assert b"".join(pieces_of(record)) == msgspec.json.encode(plain)


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=5))
def test_blocks_have_all_bytes_and_a_bounded_size(lengths: list[int]) -> None:
    pieces = [bytes([number]) * length for number, length in enumerate(lengths)]
    blocks = list(blocks_of(pieces))
    assert b"".join(blocks) == b"".join(pieces)
    assert all(len(block) == BLOCK_BYTES for block in blocks[:-1])
    assert all(0 < len(block) <= BLOCK_BYTES for block in blocks)


def test_items_are_encoded_lazily() -> None:
    made: list[int] = []

    def make() -> Iterator[str]:
        for number in range(100):
            made.append(number)
            yield "x" * BLOCK_BYTES

    blocks = blocks_of(pieces_of(JsonEach(make)))
    next(blocks)
    assert len(made) < 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_long_answer_leaves_loop_iterations_to_others(echo: EchoEngine, path: str) -> None:
    """The loop's turns are counted from the end of the generation to that of the answer."""
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += bool(echo.scheduler.admitted and not echo.scheduler.live)
        if not answered.is_set():
            asyncio.get_running_loop().call_soon(turn)

    answered = asyncio.Event()
    text = "abcdefghij" * 20
    messages = [{"role": "user", "content": text}]
    all_of_it: dict[str, Any] = {"n": 20, "max_tokens": 200}
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text, "logprobs": 20} | all_of_it,
        "/v1/chat/completions": {"messages": messages, "logprobs": True, "top_logprobs": 20}
        | all_of_it,
        "/v1/responses": {"input": text, "top_logprobs": 20},
    }
    turn()
    async with echo.web.post(path, json=asked[path]) as answer:
        data = await answer.read()
        answered.set()
        assert answer.status == 200, data
    msgspec.json.decode(data)
    if path != "/v1/responses":
        assert len(data) > 5 * BLOCK_BYTES
    assert turns >= len(data) // BLOCK_BYTES


def test_logprobs_take_little_more_than_their_bytes_while_they_wait() -> None:
    entries = [TokenLogprob(1, "a", b"a", -0.5) for _ in range(1000)]
    whole = JsonList(logprob_entries(entries))
    assert sum(map(len, whole.pieces())) < 100 * len(entries)
