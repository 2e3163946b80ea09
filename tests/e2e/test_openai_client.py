"""The official client against a server with the bundled model. It computes in float64, so that a
text is the same whatever runs beside it; what the model says is of no importance. What
`aserve selftest` checks of every server (test_selftest.py) is not repeated here.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.responses import Response
from websockets.exceptions import ConnectionClosed

from aserve.text.defaults import bad_word_ids
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.e2e.conftest import OPTIONS
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.slow

MODEL = "aserve-tiny"
SETTLE_S = 20.0


async def complete(client: AsyncOpenAI, prompt: Any = "Once", **fields: Any) -> Any:
    """An answer of a known length, that no chance ends early."""
    extra: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
    return await client.completions.create(model=MODEL, prompt=prompt, **extra, **fields)


async def events_of(client: AsyncOpenAI, *prompt: str, **fields: Any) -> list[Completion]:
    stream = await complete(client, *prompt, stream=True, **fields)
    return [event async for event in stream]


def text_of(events: list[Completion], index: int = 0) -> str:
    choices = [choice for event in events for choice in event.choices]
    return "".join(choice.text for choice in choices if choice.index == index)


async def test_60_streams_at_once_each_get_their_own_answer(client: AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        return text_of(await events_of(client, f"Once {seed}", max_tokens=30, seed=seed))

    together = await asyncio.gather(*map(ask, range(60)))
    assert together[::20] == [await ask(seed) for seed in range(0, 60, 20)]
    assert len(set(together)) > 55


async def until(is_so: Callable[[], bool]) -> None:
    """Another process says nothing by itself: it has to be asked again and again."""
    async with asyncio.timeout(SETTLE_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_full_queue_is_429_and_sigterm_ends_every_stream_and_socket(processes: str) -> None:
    limits = ("--max-num-seqs", "3", "--max-queue", "3", "--drain-timeout", "0.3")
    with ServerProcess(*OPTIONS, "--processes", processes, *limits) as server:
        async with (
            server.client() as client,
            client.responses.connect() as idle,
            client.responses.connect() as busy,
        ):
            asked: Any = {"type": "response.create", "model": MODEL, "input": "a"}
            await busy.send(asked | {"max_output_tokens": 900, "ignore_eos": True})
            assert (await busy.recv()).type == "response.created"
            streams = [asyncio.ensure_future(outcome(client)) for _ in range(2)]
            await until(lambda: server.metric("aserve_sequences_running ") == 3)
            streams += [asyncio.ensure_future(outcome(client)) for _ in range(2)]
            await until(lambda: server.metric("aserve_sequences_waiting ") == 2)
            # The third place in the queue stays free for other clients.
            with pytest.raises(openai.RateLimitError) as caught:
                await complete(client, max_tokens=5)
            assert caught.value.code == "queue_full"
            assert float(caught.value.response.headers["Retry-After"]) > 0
            ending = asyncio.ensure_future(asyncio.to_thread(server.end, signal.SIGTERM))
            assert await asyncio.gather(*streams) == ["server_draining"] * 4
            assert await end_of(idle) == ("", 1001)
            last_event, close_code = await end_of(busy)
            assert '"response.failed"' in last_event
            assert close_code == 1001
            code, took_s = await ending
        assert code == 0
        assert took_s < 25
        assert "Traceback" not in server.text


async def outcome(client: AsyncOpenAI) -> str | None:
    """How one long stream ends: its finish reason, or its error's code."""
    try:
        events = await events_of(client, "a", max_tokens=1000)
    except openai.APIError as error:
        return error.code
    return events[-1].choices[0].finish_reason


async def end_of(connection: Any) -> tuple[str, int]:
    """The last event of a websocket, if any came, and what it was closed with."""
    last = b""
    try:
        while True:
            last = await connection.recv_bytes()
    except ConnectionClosed as closed:
        return last.decode(), closed.rcvd.code if closed.rcvd else 0


ASK: dict[str, Any] = {"model": MODEL, "input": "Tell me a story.", "max_output_tokens": 24}
FINAL = ("response.completed", "response.incomplete", "response.failed", "error")


async def over_http(client: AsyncOpenAI, seed: int, **body: Any) -> Response:
    response: Response = await client.responses.create(**(ASK | body), extra_body={"seed": seed})
    return response


async def send(connection: Any, **body: Any) -> None:
    await connection.send({"type": "response.create", **ASK, **body})


async def response_events(connection: Any) -> list[Any]:
    """Up to the final one."""
    events = [await connection.recv()]
    while events[-1].type not in FINAL:
        events.append(await connection.recv())
    return events


async def test_streamed_whole_and_websocket_say_the_same(client: AsyncOpenAI) -> None:
    whole = await over_http(client, 5)
    stream = await client.responses.create(**ASK, stream=True, extra_body={"seed": 5})
    streamed = [event async for event in stream]
    async with client.responses.connect() as connection:
        await send(connection, seed=5)
        told = await response_events(connection)
    assert whole.output_text
    for answer in (streamed, told):
        deltas = [each.delta for each in answer if each.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text == answer[-1].response.output_text
        assert [each.sequence_number for each in answer] == list(range(len(answer)))
        assert answer[-1].response.status == whole.status
        assert answer[-1].response.usage.output_tokens == 24


TOKENIZER = load_tokenizer(MODEL_DIR)
STORY = "Once upon a time, there was a rabbit named Mia."


async def story(client: AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    extra = {"return_token_ids": True, "ignore_eos": True, **fields}
    answer = await client.completions.create(
        model=MODEL, prompt=STORY, max_tokens=40, temperature=0, extra_body=extra
    )
    choice: dict[str, Any] = answer.choices[0].model_dump()
    return choice | {"token_ids": tuple(choice["token_ids"])}


async def test_bad_words_are_not_said(client: AsyncOpenAI) -> None:
    """Each of the words that it would say, one after the other: of one token and of many. Other
    spellings of the same letters are other words.
    """
    banned: list[str] = []
    for _ in range(6):
        choice = await story(client, bad_words=banned)
        token_ids = choice["token_ids"]
        for word in bad_word_ids(banned, TOKENIZER):
            assert word not in {token_ids[i : i + len(word)] for i in range(len(token_ids))}
        banned.append(max(choice["text"].split(), key=len))
    assert max(map(len, bad_word_ids(banned, TOKENIZER))) > 2


async def test_only_allowed_tokens_are_said(client: AsyncOpenAI) -> None:
    allowed = sorted((await story(client))["token_ids"])[:6]
    chosen = (await story(client, allowed_token_ids=allowed, temperature=1.5))["token_ids"]
    assert len(chosen) == 40
    assert set(chosen) <= set(allowed)


async def test_a_grammar_wins_where_bans_would_leave_it_nothing(client: AsyncOpenAI) -> None:
    choices = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert (await story(client, bad_words=["yes", "no"], **choices))["text"] in ("yes", "no")
    assert (await story(client, allowed_token_ids=[300], **choices))["text"] in ("yes", "no")
    texts = {(await story(client, bad_words=[word], **choices))["text"] for word in ("yes", "no")}
    assert texts == {"yes", "no"}


class GetWeather(pydantic.BaseModel):
    """Tells the weather in a city."""

    city: str


WEATHER_TOOL = openai.pydantic_function_tool(GetWeather, name="get_weather")
RESPONSE_TOOL: Any = {"type": "function", **WEATHER_TOOL["function"]}
QUESTION: Any = {"role": "user", "content": "What is the weather in Rome?"}
RESULT = '{"weather": "sunny", "celsius": 21}'
SAID = "It is sunny in Rome and 21 degrees."
SUM: Any = {"role": "user", "content": "What is 27 plus 15?"}
THOUGHT = "7+5=12 20+10=30 30+12=42"


async def test_a_tool_is_called_and_its_result_is_told(client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "tools": [WEATHER_TOOL], "temperature": 0}
    asked = await client.chat.completions.create(messages=[QUESTION], **fields)
    (choice,) = asked.choices
    (call,) = choice.message.tool_calls or [None]
    assert call is not None
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert call.type == "function"
    assert GetWeather.model_validate_json(call.function.arguments) == GetWeather(city="Rome")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    messages = [QUESTION, choice.message.model_dump(exclude_none=True), result]
    told = await client.chat.completions.create(messages=messages, **fields)
    assert (told.choices[0].message.content, told.choices[0].finish_reason) == (SAID, "stop")


class GetTime(pydantic.BaseModel):
    zone: Literal["UTC", "CET"]


async def test_calls_are_forced_by_a_grammar_at_any_temperature(client: AsyncOpenAI) -> None:
    """Also several calls in one message, and one of a named tool, which the model does not know."""
    tools = [WEATHER_TOOL, openai.pydantic_function_tool(GetTime, name="tell_time")]
    types: dict[str, type[pydantic.BaseModel]] = {"get_weather": GetWeather, "tell_time": GetTime}
    named: Any = {"type": "function", "function": {"name": "tell_time"}}
    nums_calls = set()
    for seed, choice in enumerate(["required"] * 6 + [named] * 2):
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[QUESTION],
            tools=tools,
            tool_choice=choice,
            temperature=1.2,
            max_tokens=300,
            seed=seed,
        )
        calls: Any = answer.choices[0].message.tool_calls or ()
        if answer.choices[0].finish_reason == "length":
            continue
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in calls:
            types[call.function.name].model_validate_json(call.function.arguments)
        if choice is named:
            assert [call.function.name for call in calls] == ["tell_time"]
        else:
            nums_calls.add(len(calls))
    assert nums_calls >= {1}


async def test_the_helper_for_streams_reads_calls_and_reasoning(client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0}
    async with client.chat.completions.stream(
        messages=[QUESTION], tools=[WEATHER_TOOL], **fields
    ) as stream:
        kinds = [event.type async for event in stream]
        message = (await stream.get_final_completion()).choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 1
    calls: Any = message.tool_calls
    (call,) = calls
    assert call.function.parsed_arguments == GetWeather(city="Rome")
    chunks = await client.chat.completions.create(messages=[SUM], stream=True, **fields)
    deltas = [chunk.choices[0].delta.model_dump() async for chunk in chunks]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.get("content") or "" for delta in deltas) == "27 plus 15 is 42."


async def test_responses_call_a_tool_over_http_a_stream_and_a_websocket(
    client: AsyncOpenAI,
) -> None:
    """The result of the tool comes as an item of the next request on the same socket."""
    asked: dict[str, Any] = {"input": QUESTION["content"], "tools": [RESPONSE_TOOL]}
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0}
    whole = await client.responses.create(**asked, **fields)
    async with client.responses.stream(**asked, **fields) as stream:
        streamed = [event async for event in stream]
        final = await stream.get_final_response()
    async with client.responses.connect() as connection:
        await send(connection, max_output_tokens=100, **asked, **fields)
        told = await response_events(connection)
        call = told[-1].response.output[0]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        follow_up = {"input": [output], "previous_response_id": told[-1].response.id}
        await send(connection, max_output_tokens=100, **fields, **(asked | follow_up))
        answer = (await response_events(connection))[-1].response
    outputs: list[Any] = [whole.output, final.output, told[-1].response.output]
    for (item,) in outputs:
        assert (item.type, item.name, item.arguments) == (
            "function_call",
            "get_weather",
            '{"city": "Rome"}',
        )
    assert list(dict.fromkeys(e.type for e in streamed)) == list(
        dict.fromkeys(e.type for e in told)
    )
    assert answer.output_text == SAID


async def test_reasoning_is_an_item_of_a_response_and_part_of_the_next_turn(
    client: AsyncOpenAI,
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0}
    first = await client.responses.create(input=SUM["content"], background=True, **fields)
    assert first.status == "queued"
    async with asyncio.timeout(SETTLE_S):
        while first.status in ("queued", "in_progress"):
            first = await client.responses.retrieve(first.id)
    reasoning, message = first.output
    assert message.type == "message"
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or ()] == [THOUGHT]
    assert first.output_text == "27 plus 15 is 42."
    items: Any = [SUM, *(item.model_dump(exclude_none=True) for item in first.output), QUESTION]
    by_items = await client.responses.create(input=items, **fields)
    by_id = await client.responses.create(input=[QUESTION], previous_response_id=first.id, **fields)
    assert by_items.output_text == by_id.output_text


async def test_only_the_allowed_tokens_are_sampled_and_no_end(client: AsyncOpenAI) -> None:
    extra = {"allowed_token_ids": [300], "return_token_ids": True}
    answer = await client.completions.create(
        model="aserve-tiny",
        prompt="Once upon a time",
        max_tokens=5,
        temperature=0,
        extra_body=extra,
    )
    assert answer.choices[0].model_dump()["token_ids"] == [300] * 5
