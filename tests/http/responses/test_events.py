"""The events of a response as values: numbered, complete, and the client's own types parse them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from aserve.errors import ErrorInfo
from aserve.http.long_json import pieces_of
from aserve.http.openai.parsed import ParsePlan
from aserve.http.responses.body import TextConfig, TextFormat
from aserve.http.responses.event_maker import EventMaker
from aserve.http.responses.events import Event
from aserve.http.responses.records import ResponseObject
from aserve.messages.output import OutputChunk, Usage
from aserve.messages.scored import TokenLogprob, TopLogprob
from aserve.unread import merge

CLIENT_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
HEADING = ResponseObject(
    id="resp_1",
    created_at=1_700_000_000,
    model="echo",
    instructions="Be brief.",
    max_output_tokens=5,
    previous_response_id=None,
    store=True,
    temperature=0.5,
    top_p=1.0,
    top_logprobs=1,
    text=TextConfig(TextFormat("text")),
    tool_choice="auto",
    metadata={"a": "b"},
    user=None,
    seed=7,
)
BEGINNING = ["created", "in_progress", "output_item.added", "content_part.added"]
END = ["output_text.done", "content_part.done", "output_item.done"]
LATE = ErrorInfo("too late", "timeout_error", "deadline_exceeded", 408)


def chunk(text: str, num_tokens: int, **fields: Any) -> OutputChunk:
    entries = tuple(
        TokenLogprob(i, f"t{i}", b"t%d" % i, -0.25, (TopLogprob(i, "x", b"x", -0.5),))
        for i in range(len(text))
    )
    return OutputChunk("1-0", 0, text, b"", Usage(4, num_tokens, 2), entries, **fields)


def told(chunks: Iterable[OutputChunk]) -> list[dict[str, Any]]:
    maker = EventMaker(HEADING)
    return as_json([event for each in chunks for event in maker.add(each)])


def as_json(events: list[Event]) -> list[dict[str, Any]]:
    """As a client reads them, checked strictly against its own types."""
    read: list[dict[str, Any]] = []
    for event in events:
        data = b"".join(pieces_of(event))
        CLIENT_EVENT.validate_json(data, strict=True)
        read.append(msgspec.json.decode(data))
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    return read


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_response_has_events_from_created_to_completed() -> None:
    events = told([chunk("ab", 2), chunk("", 2), chunk("c", 3, finish_reason="stop")])
    deltas = ["output_text.delta"] * 2
    assert kinds(events) == [*BEGINNING, *deltas, *END, "completed"]
    assert [event["delta"] for event in events[4:6]] == ["ab", "c"]
    assert [len(event["logprobs"]) for event in events[4:7]] == [2, 1, 3]
    first, last = events[0]["response"], events[-1]["response"]
    changed = {name for name in last if first[name] != last[name]}
    assert changed == {"status", "output", "usage"}
    (item,) = last["output"]
    assert (item["status"], item["content"][0]["text"]) == ("completed", "abc")
    assert item == events[-2]["item"]
    assert item["content"] == [events[-3]["part"]]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert (last["usage"]["output_tokens"], last["usage"]["total_tokens"]) == (3, 7)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 8)))
def test_the_done_events_are_the_same_for_every_split_of_chunks(cuts: list[int]) -> None:
    pieces = [chunk(letter, i + 1) for i, letter in enumerate("grün 한글")]
    pieces.append(chunk("", 9, finish_reason="stop"))
    joined = []
    while pieces:
        size = cuts.pop() if cuts else 1
        joined.append(merge(pieces[:size]))
        pieces = pieces[size:]
    events = told(joined)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "grün 한글"
    done = [event for event in events if event not in deltas]
    assert kinds(done) == [*BEGINNING, *END, "completed"]
    (content,) = done[-1]["response"]["output"][0]["content"]
    assert (done[4]["text"], content["text"]) == ("grün 한글", "grün 한글")
    entries = [entry for event in deltas for entry in event["logprobs"]]
    assert done[4]["logprobs"] == content["logprobs"] == entries


OUTPUT = (
    "<|think|>so<|/think|>Wait.<|tool_call|>"
    '{"name": "f", "arguments": {"a": 1}}<|/tool_call|>'
    '<|tool_call|>{"name": "g", "arguments": {}}<|/tool_call|>'
)
PARSE = ParsePlan(reasoning="aserve_tiny", tools="aserve_tiny")
ITEM = ["output_item.added"]
PART = [*ITEM, "content_part.added"]
CALL_END = ["function_call_arguments.done", "output_item.done"]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 12)))
def test_reasoning_text_and_calls_are_items_whatever_the_chunks(cuts: list[int]) -> None:
    text, pieces = OUTPUT, []
    while text:
        size = cuts.pop() if cuts else 9
        pieces.append(text[:size])
        text = text[size:]
    maker = EventMaker(HEADING, parse=PARSE)
    chunks = [chunk(piece, i + 1) for i, piece in enumerate(pieces)]
    chunks.append(chunk("", 99, finish_reason="stop"))
    events = as_json([event for each in chunks for event in maker.add(each)])
    done = [event for event in events if not event["type"].endswith(".delta")]
    assert kinds(done) == [
        *BEGINNING[:2],
        *PART,
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *(*PART, *END),
        *(*ITEM, *CALL_END),
        *(*ITEM, *CALL_END),
        "completed",
    ]
    reasoning, message, *calls = done[-1]["response"]["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "so")
    assert message["content"][0]["text"] == "Wait."
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert len({item["id"] for item in (reasoning, message, *calls)}) == 4
    assert len({call["call_id"] for call in calls}) == 2
    items = [event["item"] for event in done if event["type"].endswith("item.done")]
    assert items == [reasoning, message, *calls]
    for index, text in enumerate(["so", "Wait.", '{"a": 1}', "{}"]):
        deltas = [e["delta"] for e in events if "delta" in e and e["output_index"] == index]
        assert "".join(deltas) == text


def test_a_response_that_ends_inside_a_call_is_incomplete_there() -> None:
    maker = EventMaker(HEADING, parse=PARSE)
    cut = OUTPUT.index(" 1}")
    last: list[Any] = maker.add(chunk(OUTPUT[:cut], 9, finish_reason="length"))
    assert [item.status for item in maker.response.output] == [
        "completed",
        "completed",
        "incomplete",
    ]
    assert last[-1].type == "response.incomplete"
    assert last[-2].item.arguments == '{"a":'


def test_an_empty_answer_at_its_length_limit_has_all_events_except_deltas() -> None:
    events = told([chunk("", 1, finish_reason="length")])
    assert kinds(events) == [*BEGINNING, *END, "incomplete"]
    response = events[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == ""
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("status", "code"),
    [(408, "server_error"), (429, "rate_limit_exceeded"), (400, "invalid_prompt")],
)
def test_a_failed_response_keeps_its_output(status: int, code: str) -> None:
    error = msgspec.structs.replace(LATE, status=status)
    events = told([chunk("ab", 2), chunk("c", 3, finish_reason="error", error=error)])
    assert kinds(events) == [*BEGINNING, "output_text.delta", "output_text.delta", "failed"]
    response = events[-1]["response"]
    assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")
    assert response["output"][0]["content"][0]["text"] == "abc"
    assert (response["error"]["code"], response["error"]["message"]) == (code, "too late")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_response_that_is_cancelled_ends_with_what_it_has(has_begun: bool) -> None:
    maker = EventMaker(HEADING)
    events = maker.add(chunk("ab", 2)) if has_begun else maker.open()
    assert not maker.is_done
    read = as_json(events + maker.cancel())
    middle = [*BEGINNING[2:], "output_text.delta", *END] if has_begun else []
    assert kinds(read) == [*BEGINNING[:2], *middle, "incomplete"]
    assert maker.is_done
    assert maker.response.status == "cancelled"
    Response.model_validate_json(b"".join(pieces_of(maker.response)), strict=True)
