"""/v1/responses over HTTP through the official client; the template is `u:text;`, echoed back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from aserve.errors import StepError
from aserve.http.responses.event_maker import EventMaker
from aserve.http.responses.events import Event
from aserve.messages.output import OutputChunk
from aserve.messages.requests import Grammar
from aserve.parsers.registry import ParserNames
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import prompts

T = TypeVar("T")
TINY = load_tokenizer(MODEL_DIR)
ASK: dict[str, Any] = {"model": "echo", "input": "hello 한", "temperature": 0}


async def streamed(echo: EchoEngine, **body: Any) -> list[ResponseStreamEvent]:
    stream = await echo.client.responses.create(**(ASK | body), stream=True)
    return [event async for event in stream]


async def ask(echo: EchoEngine, **body: Any) -> Response:
    response: Response = await echo.client.responses.create(**(ASK | body))
    return response


async def readable(echo: EchoEngine, *ids: str) -> set[str]:
    """Which of these responses are stored."""
    found = set()
    for response_id in ids:
        with contextlib.suppress(openai.NotFoundError):
            found.add((await echo.client.responses.retrieve(response_id)).id)
    return found


def parts_of(response: Response) -> Any:
    return parts_of_item(response.output[0])


def parts_of_item(item: Any) -> Any:
    assert item.type == "message"
    return item.content


@contextlib.asynccontextmanager
async def paused(
    echo: EchoEngine, asked: Coroutine[Any, Any, T]
) -> AsyncIterator[tuple[asyncio.Task[T], str]]:
    """A request that the engine did one step of, and the id of its response."""
    echo.scheduler.is_paused = True
    task = asyncio.create_task(asked)
    await echo.until(lambda: bool(echo.scheduler.live) or task.done())
    echo.scheduler.step()
    yield task, "resp_" + echo.scheduler.admitted[0].request_id.removesuffix("-0")
    await echo.until(lambda: not echo.scheduler.live)
    assert echo.gateway.num_open == 0


async def test_a_whole_answer_is_the_response_of_the_last_event(echo: EchoEngine) -> None:
    body: dict[str, Any] = {
        "max_output_tokens": 6,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "store": False,
        "extra_body": {"seed": 5},
    }
    whole = await ask(echo, **body)
    events = await streamed(echo, **body)
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert whole.output_text.startswith("u:h")
    assert whole.incomplete_details is not None
    shown = whole.model_dump(exclude={"id", "created_at", "output"})
    assert last.response.model_dump(exclude={"id", "created_at", "output"}) == shown
    assert (shown["metadata"], shown["store"], shown["seed"]) == ({"a": "b"}, False, 5)
    content = parts_of(whole)[0]
    assert parts_of(last.response) == [content]
    assert [len(entry.top_logprobs) for entry in content.logprobs] == [2] * 6


async def test_every_event_has_its_type_and_there_is_no_done_event(echo: EchoEngine) -> None:
    async with echo.web.post("/v1/responses", json=ASK | {"stream": True}) as answer:
        frames = (await answer.text()).removesuffix("\n\n").split("\n\n")
    for frame in frames:
        name, data = frame.split("\n")
        assert data.startswith(f'data: {{"type":"{name.removeprefix("event: ")}"')
    assert frames[-1].startswith("event: response.completed")


async def test_messages_come_as_texts_parts_and_earlier_outputs(echo: EchoEngine) -> None:
    first = await ask(echo)
    parts = [{"type": "input_text", "text": "ab"}, {"type": "input_text", "text": "cd"}]
    given: list[Any] = [
        {"role": "developer", "content": "d"},
        first.output[0].model_dump(),
        {"type": "message", "role": "user", "content": parts},
    ]
    await ask(echo, input=given, instructions="i", max_output_tokens=1)
    assert prompts(echo)[-1] == "s:i;s:d;a:u:hello 한;;u:abcd;"


async def test_an_earlier_refusal_is_text_of_the_assistant_only(echo: EchoEngine) -> None:
    parts = [{"type": "output_text", "text": "I "}, {"type": "refusal", "refusal": "won't"}]
    said: Any = {"type": "message", "role": "assistant", "content": parts}
    await ask(echo, input=[said, {"role": "user", "content": "u"}], max_output_tokens=1)
    assert prompts(echo)[-1] == "a:I won't;u:u;"
    with pytest.raises(openai.BadRequestError, match="content type 'refusal'"):
        await ask(echo, input=[said | {"role": "user"}])


async def test_the_format_of_the_text_is_a_grammar_and_is_shown(echo: EchoEngine) -> None:
    asked: Any = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    made = await ask(echo, text={"format": asked})
    (request,) = echo.scheduler.admitted
    assert request.sampling.grammar == Grammar("json_schema", '{"type":"object"}', "text.format")
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.to_dict() == asked


async def test_a_response_continues_the_whole_conversation_but_not_its_instructions(
    echo: EchoEngine,
) -> None:
    first = await ask(echo, input="a", instructions="x", max_output_tokens=4)
    second = await ask(echo, input="b", previous_response_id=first.id, max_output_tokens=1)
    third = await ask(echo, input="c", previous_response_id=second.id, instructions="y")
    assert prompts(echo) == ["s:x;u:a;", "u:a;a:s:x;;u:b;", "s:y;u:a;a:s:x;;u:b;a:u;u:c;"]
    assert third.previous_response_id == second.id
    items = [item async for item in echo.client.responses.input_items.list(third.id, limit=2)]
    texts = [parts_of_item(item)[0].text for item in items]
    assert texts == ["c", "u", "b", "s:x;", "a"]
    page = await echo.client.responses.input_items.list(third.id, order="asc", limit=2)
    assert (page.has_more, [item.id for item in page.data]) == (True, [items[-1].id, items[-2].id])


async def test_a_stored_response_is_read_until_it_is_deleted(echo: EchoEngine) -> None:
    made = await ask(echo)
    responses = echo.client.responses
    assert await responses.retrieve(made.id) == made
    await responses.delete(made.id)
    for again in (responses.retrieve, responses.delete, responses.cancel):
        with pytest.raises(openai.NotFoundError, match=made.id):
            await again(made.id)


@pytest.mark.parametrize(
    ("options", "num_kept"),
    [({}, 2), ({"max_stored_responses": 1}, 1), ({"max_stored_bytes": 100}, 0)],
)
async def test_at_most_max_stored_responses_are_stored(
    options: dict[str, Any], num_kept: int
) -> None:
    async with EchoEngine(**options) as echo:
        first, second = await ask(echo), await ask(echo)
        assert len(await readable(echo, first.id, second.id)) == num_kept


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_running_response_is_cancelled_by_its_id(
    echo: EchoEngine, is_streaming: bool
) -> None:
    asked: Any = streamed(echo) if is_streaming else ask(echo)
    async with paused(echo, asked) as (answer, response_id):
        assert (await echo.client.responses.retrieve(response_id)).status == "in_progress"
        with pytest.raises(openai.NotFoundError):
            await echo.client.responses.cancel(response_id[:-1])
        cancelled = await echo.client.responses.cancel(response_id)
        assert cancelled.status == "cancelled"
        given: Any = await answer
        assert (given[-1].response if is_streaming else given) == cancelled
        assert await echo.client.responses.retrieve(response_id) == cancelled
        assert await echo.client.responses.cancel(response_id) == cancelled


async def test_a_response_that_is_not_stored_can_be_cancelled_but_not_read_or_continued(
    echo: EchoEngine,
) -> None:
    async with paused(echo, ask(echo, store=False)) as (answer, response_id):
        assert not await readable(echo, response_id)
        assert (await echo.client.responses.cancel(response_id)).status == "cancelled"
        assert (await answer).status == "cancelled"
        assert not await readable(echo, response_id)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(echo, previous_response_id=response_id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_a_finished_response_cannot_be_cancelled(echo: EchoEngine) -> None:
    made = await ask(echo)
    with pytest.raises(openai.BadRequestError, match="it is completed"):
        await echo.client.responses.cancel(made.id)


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_failed_step_is_a_failed_response_or_an_error_status(
    echo: EchoEngine, is_streaming: bool
) -> None:
    asked: Any = streamed(echo) if is_streaming else ask(echo)
    async with paused(echo, asked) as (answer, response_id):
        await echo.until(lambda: len(echo.detokenizer.inbox) == 0)
        echo.scheduler.fail(StepError("it broke").info())
        if is_streaming:
            last = (await answer)[-1]
            assert (last.type, last.response.error.message) == ("response.failed", "it broke")
            assert (await echo.client.responses.retrieve(response_id)).status == "failed"
        else:
            with pytest.raises(openai.InternalServerError, match="it broke"):
                await answer


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third chunk raises."""
    add = EventMaker.add
    calls = iter(range(5))

    def fail(maker: EventMaker, chunk: OutputChunk) -> list[Event]:
        if next(calls) == 2:
            raise RuntimeError("secret")
        return add(maker, chunk)

    monkeypatch.setattr(EventMaker, "add", fail)


@pytest.mark.usefixtures("bug")
async def test_a_bug_in_the_middle_of_a_stream_ends_it_with_a_failed_response(
    echo: EchoEngine,
) -> None:
    last = (await streamed(echo))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "secret" not in last.response.error.message
    assert (await echo.client.responses.retrieve(last.response.id)).status == "failed"


@pytest.mark.usefixtures("bug")
async def test_a_bug_in_the_background_is_a_failed_response_and_is_logged(
    echo: EchoEngine, caplog: pytest.LogCaptureFixture
) -> None:
    done = await polled(echo, (await ask(echo, background=True)).id)
    assert done.status == "failed"
    assert done.error is not None
    assert done.error.message == f"internal error; the response is {done.id}"
    gc.collect()
    assert "RuntimeError: secret" in caplog.text


async def test_a_failure_before_the_first_event_has_its_own_status(echo: EchoEngine) -> None:
    for body in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await echo.client.responses.create(**(ASK | {"input": "x" * 600} | body))
        assert caught.value.param == "input"


async def test_a_draining_server_creates_no_responses_but_returns_stored_ones(
    echo: EchoEngine,
) -> None:
    made = await ask(echo)
    echo.state.phase = "draining"
    for is_streaming in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(echo, stream=is_streaming)
        assert (caught.value.status_code, caught.value.code) == (503, "server_draining")
    assert await echo.client.responses.retrieve(made.id) == made


async def test_the_events_of_a_background_stream_are_read_from_any_number_on(
    echo: EchoEngine,
) -> None:
    events = await streamed(echo, background=True)
    last: Any = events[-1]
    response = last.response
    for number in (None, 0, 3, len(events) - 1):
        query: Any = {} if number is None else {"starting_after": number}
        stream = await echo.client.responses.retrieve(response.id, stream=True, **query)
        assert [event async for event in stream] == events[0 if number is None else number + 1 :]
    assert await echo.client.responses.retrieve(response.id) == response
    await echo.client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await echo.client.responses.retrieve(response.id, stream=True)
    made = await ask(echo)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        await echo.client.responses.retrieve(made.id, stream=True)


async def test_a_background_stream_goes_on_without_its_client_and_can_be_cancelled() -> None:
    async with (
        EchoEngine(resume_ttl=0.05) as echo,
        paused(echo, streamed(echo, background=True)) as (asked, response_id),
    ):
        await echo.until(lambda: bool(echo.scheduler.live))
        asked.cancel()
        await asyncio.sleep(0.1)
        assert echo.scheduler.live
        cancelled = await echo.client.responses.cancel(response_id)
        stream = await echo.client.responses.retrieve(response_id, stream=True)
        last = [event async for event in stream][-1]
        assert (last.type, cancelled.status) == ("response.incomplete", "cancelled")


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=msg_0"])
async def test_a_wrong_page_is_refused_by_name(echo: EchoEngine, query: str) -> None:
    made = await ask(echo)
    async with echo.web.get(f"/v1/responses/{made.id}/input_items?{query}") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == query.partition("=")[0]


TOOL: Any = {
    "type": "function",
    "name": "f",
    "description": None,
    "parameters": {"type": "object"},
    "strict": None,
}


def call(arguments: str) -> str:
    return f'<|tool_call|>{{"name": "f", "arguments": {arguments}}}<|/tool_call|>'


@contextlib.asynccontextmanager
async def tool_engine(template: str) -> AsyncIterator[EchoEngine]:
    parsers = ParserNames("aserve_tiny", "aserve_tiny")
    async with EchoEngine(tokenizer=TINY, template=template, parsers=parsers) as echo:
        yield echo


async def test_calls_their_outputs_and_reasoning_are_one_turn_of_the_chat() -> None:
    """Whether they come by the id of the earlier response or as items of the input."""
    async with tool_engine("{{ messages[-1].content }}") as echo:
        asked = "<|think|>so<|/think|>Wait." + call('{"a": 1}')
        first = await ask(echo, input=asked, tools=[TOOL])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        made: Any = first.output[-1]
        output = {"type": "function_call_output", "call_id": made.call_id, "output": "4"}
        second = await ask(echo, input=[output], previous_response_id=first.id, tools=[TOOL])
        given = [item.model_dump(exclude_none=True) for item in first.output]
        items: Any = [{"role": "user", "content": asked}, *given, output]
        listed = [item async for item in echo.client.responses.input_items.list(second.id)]
        kept = {item.type: item.model_dump() for item in listed}
        assert (kept["function_call"]["call_id"], kept["function_call_output"]["output"]) == (
            made.call_id,
            "4",
        )
    async with tool_engine("{{ messages | tojson }}{{ tools | tojson }}") as echo:
        count = await echo.client.responses.input_tokens.count(
            model="echo", input=items, tools=[TOOL]
        )
        await ask(echo, input=items, tools=[TOOL], max_output_tokens=1)
        (prompt,) = prompts(echo)
    messages, tools = msgspec.json.decode(f"[{prompt.replace('][', '],[')}]")
    user, assistant, result = messages
    assert user["content"] == asked
    assert (assistant["content"], assistant["reasoning_content"]) == ("Wait.", "so")
    assert assistant["tool_calls"] == [
        {"function": {"name": "f", "arguments": {"a": 1}}, "id": made.call_id, "type": "function"}
    ]
    assert (result["role"], result["tool_call_id"], result["content"]) == (
        "tool",
        made.call_id,
        "4",
    )
    function = {"name": "f", "parameters": {"type": "object"}}
    assert tools == [{"type": "function", "function": function}]
    assert count.input_tokens == len(TINY.encode(prompt, with_special=False))
    assert [tool.to_dict() for tool in first.tools] == [TOOL]


async def test_a_response_in_the_background_is_polled_and_outlives_its_client(
    echo: EchoEngine,
) -> None:
    echo.scheduler.is_paused = True
    made = await ask(echo, background=True)
    assert (made.status, made.background) == ("queued", True)
    await echo.until(lambda: bool(echo.scheduler.live))
    echo.scheduler.step()
    await echo.until(lambda: len(echo.detokenizer.inbox) == 0)
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    await echo.until(lambda: not echo.scheduler.live and echo.gateway.num_open == 0)
    done = await polled(echo, made.id)
    assert (done.status, done.output_text) == ("completed", "u:hello 한;")


async def polled(echo: EchoEngine, response_id: str) -> Response:
    async with asyncio.timeout(60):
        while True:
            response = await echo.client.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response


async def test_a_response_in_the_background_is_cancelled_by_its_id(echo: EchoEngine) -> None:
    echo.scheduler.is_paused = True
    made = await ask(echo, background=True)
    await echo.until(lambda: bool(echo.scheduler.live))
    assert (await echo.client.responses.cancel(made.id)).status == "cancelled"
    await echo.until(lambda: not echo.scheduler.live)
    assert (await echo.client.responses.retrieve(made.id)).status == "cancelled"


async def test_a_response_that_runs_is_cancelled_when_it_is_deleted() -> None:
    async with (
        EchoEngine(resume_ttl=60) as echo,
        paused(echo, streamed(echo, background=True)) as (asked, response_id),
    ):
        await echo.client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            await echo.client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            await echo.client.responses.delete(response_id)
        asked.cancel()


@pytest.mark.parametrize("how", ["background", "resumable"])
async def test_readers_of_a_deleted_response_get_its_last_event(echo: EchoEngine, how: str) -> None:
    reading = streamed(echo, extra_body={how: True})
    async with paused(echo, reading) as (asked, response_id):
        await echo.client.responses.delete(response_id)
        assert (await asked)[-1].type == "response.incomplete"


async def test_a_refusal_in_the_background_is_a_failed_response(echo: EchoEngine) -> None:
    made = await ask(echo, background=True, input="x" * 600)
    done = await polled(echo, made.id)
    assert done.error is not None
    assert (done.status, done.error.code) == ("failed", "invalid_prompt")


async def test_the_end_of_the_server_ends_what_runs_in_the_background() -> None:
    async with EchoEngine() as echo:
        echo.scheduler.is_paused = True
        await ask(echo, background=True)
        await echo.until(lambda: bool(echo.scheduler.live))
    assert echo.gateway.num_open == 0


async def test_truncation_auto_keeps_the_end_of_a_long_prompt(echo: EchoEngine) -> None:
    made = await ask(echo, input="x" * 600 + "end", truncation="auto", max_output_tokens=16)
    assert made.truncation == "auto"
    (prompt,) = prompts(echo)
    assert prompt.endswith("xend;")
    assert len(prompt) == 512 - 16
