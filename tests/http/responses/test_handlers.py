"""/v1/responses over HTTP through the official client; the template is `u:text;`, echoed back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from aserve.errors import StepError
from aserve.http.responses.events import Event, EventMaker
from aserve.messages.base import array_i32
from aserve.messages.output import OutputChunk
from aserve.messages.requests import Grammar
from aserve.text.defaults import GenerationDefaults
from tests.fakes.echo_engine import EchoEngine

ASK: dict[str, Any] = {"model": "echo", "input": "hello 한", "temperature": 0}


async def streamed(client: openai.AsyncOpenAI, **body: Any) -> list[ResponseStreamEvent]:
    stream = await client.responses.create(**(ASK | body), stream=True)
    return [event async for event in stream]


async def ask(client: openai.AsyncOpenAI, **body: Any) -> Response:
    response: Response = await client.responses.create(**(ASK | body))
    return response


async def readable(client: openai.AsyncOpenAI, *ids: str) -> set[str]:
    """Which of these responses are stored."""
    found = set()
    for response_id in ids:
        with contextlib.suppress(openai.NotFoundError):
            found.add((await client.responses.retrieve(response_id)).id)
    return found


def parts_of(response: Response) -> Any:
    return parts_of_item(response.output[0])


def parts_of_item(item: Any) -> Any:
    assert item.type == "message"
    return item.content


def prompts(echo: EchoEngine) -> list[str]:
    ids = [array_i32(request.prompt_ids).tolist() for request in echo.scheduler.admitted]
    return [echo.tokenizer.decode(each) for each in ids]


async def first_step(echo: EchoEngine, post: asyncio.Future[Any]) -> None:
    """The engine stands still after it."""
    await echo.until(lambda: bool(echo.scheduler.live) or post.done())
    echo.scheduler.step()


async def test_a_whole_answer_is_the_response_of_the_last_event(
    client: openai.AsyncOpenAI,
) -> None:
    body: dict[str, Any] = {
        "max_output_tokens": 6,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "store": False,
        "extra_body": {"seed": 5},
    }
    whole = await ask(client, **body)
    events = await streamed(client, **body)
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


async def test_logprobs_are_asked_for_by_name_or_by_number(client: openai.AsyncOpenAI) -> None:
    named = await ask(client, include=["message.output_text.logprobs"])
    counted = await ask(client, top_logprobs=1)
    plain = await ask(client)
    tops = [
        [len(entry.top_logprobs) for entry in parts_of(each)[0].logprobs]
        for each in (named, counted, plain)
    ]
    length = len(tops[0])
    assert tops == [[0] * length, [1] * length, []]


async def test_the_clients_own_stream_gathers_the_text(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="echo", input="hello 한") as stream:
        texts = [
            event.delta async for event in stream if event.type == "response.output_text.delta"
        ]
        response = await stream.get_final_response()
    assert "".join(texts) == response.output_text == "u:hello 한;"


async def test_every_event_has_its_type_and_there_is_no_done_event(
    web: aiohttp.ClientSession,
) -> None:
    async with web.post("/v1/responses", json=ASK | {"stream": True}) as answer:
        frames = (await answer.text()).removesuffix("\n\n").split("\n\n")
    for frame in frames:
        name, data = frame.split("\n")
        assert data.startswith(f'data: {{"type":"{name.removeprefix("event: ")}"')
    assert frames[-1].startswith("event: response.completed")


async def test_messages_come_as_texts_parts_and_earlier_outputs(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    first = await ask(client)
    parts = [{"type": "input_text", "text": "ab"}, {"type": "input_text", "text": "cd"}]
    given: list[Any] = [
        {"role": "developer", "content": "d"},
        first.output[0].model_dump(),
        {"type": "message", "role": "user", "content": parts},
    ]
    await ask(client, input=given, instructions="i", max_output_tokens=1)
    assert prompts(echo)[-1] == "s:i;s:d;a:u:hello 한;;u:abcd;"


async def test_the_templates_variables_reach_it_and_defaults_are_shown() -> None:
    async with (
        EchoEngine(template="{{ mood }}{{ messages | length }}") as echo,
        openai.AsyncOpenAI(base_url=f"{echo.url}/v1", api_key="any") as client,
    ):
        echo.state.defaults = GenerationDefaults(temperature=0.5, top_p=0.25)
        made: Response = await client.responses.create(
            model="echo", input="a", extra_body={"chat_template_kwargs": {"mood": "glad"}}
        )
    assert prompts(echo) == ["glad1"]
    assert (made.temperature, made.top_p) == (0.5, 0.25)


async def test_the_format_of_the_text_is_a_grammar_and_is_shown(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    asked: Any = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    made = await ask(client, text={"format": asked})
    (request,) = echo.scheduler.admitted
    assert request.sampling.grammar == Grammar("json_schema", '{"type":"object"}', "text.format")
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.to_dict() == asked


async def test_a_response_continues_the_whole_conversation_but_not_its_instructions(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    first = await ask(client, input="a", instructions="x", max_output_tokens=4)
    second = await ask(client, input="b", previous_response_id=first.id, max_output_tokens=1)
    third = await ask(client, input="c", previous_response_id=second.id, instructions="y")
    assert prompts(echo) == ["s:x;u:a;", "u:a;a:s:x;;u:b;", "s:y;u:a;a:s:x;;u:b;a:u;u:c;"]
    assert third.previous_response_id == second.id
    items = [item async for item in client.responses.input_items.list(third.id, limit=2)]
    texts = [parts_of_item(item)[0].text for item in items]
    assert texts == ["c", "u", "b", "s:x;", "a"]
    page = await client.responses.input_items.list(third.id, order="asc", limit=2)
    assert (page.has_more, [item.id for item in page.data]) == (True, [items[-1].id, items[-2].id])


async def test_a_stored_response_is_read_until_it_is_deleted(client: openai.AsyncOpenAI) -> None:
    made = await ask(client)
    assert await client.responses.retrieve(made.id) == made
    await client.responses.delete(made.id)
    for gone in (
        client.responses.retrieve(made.id),
        client.responses.delete(made.id),
        client.responses.cancel(made.id),
    ):
        with pytest.raises(openai.NotFoundError, match=made.id):
            await gone


async def test_a_response_that_is_not_stored_cannot_be_read_or_continued(
    client: openai.AsyncOpenAI,
) -> None:
    made = await ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("options", "num_kept"),
    [({}, 2), ({"max_stored_responses": 1}, 1), ({"max_stored_bytes": 100}, 0)],
)
async def test_at_most_max_stored_responses_are_stored(
    options: dict[str, Any], num_kept: int
) -> None:
    async with (
        EchoEngine(**options) as echo,
        openai.AsyncOpenAI(base_url=f"{echo.url}/v1", api_key="any") as client,
    ):
        first, second = await ask(client), await ask(client)
        assert len(await readable(client, first.id, second.id)) == num_kept


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_running_response_is_cancelled_by_its_id(
    echo: EchoEngine, client: openai.AsyncOpenAI, is_streaming: bool
) -> None:
    echo.scheduler.is_paused = True
    answer = asyncio.ensure_future(streamed(client) if is_streaming else ask(client))
    await first_step(echo, answer)
    response_id = "resp_" + echo.scheduler.admitted[0].request_id.removesuffix("-0")
    assert (await client.responses.retrieve(response_id)).status == "in_progress"
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel(response_id[:-1])
    cancelled = await client.responses.cancel(response_id)
    assert cancelled.status == "cancelled"
    given: Any = await answer
    last = given[-1].response if is_streaming else given
    assert last == cancelled
    assert await client.responses.retrieve(response_id) == cancelled
    assert await client.responses.cancel(response_id) == cancelled
    await echo.until(lambda: not echo.scheduler.live)
    assert echo.gateway.num_open == 0


async def test_a_response_that_is_not_stored_can_be_cancelled_but_not_read(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    echo.scheduler.is_paused = True
    answer = asyncio.ensure_future(ask(client, store=False))
    await first_step(echo, answer)
    response_id = "resp_" + echo.scheduler.admitted[0].request_id.removesuffix("-0")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response_id)
    assert (await client.responses.cancel(response_id)).status == "cancelled"
    assert (await answer).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response_id)


async def test_a_finished_response_cannot_be_cancelled(client: openai.AsyncOpenAI) -> None:
    made = await ask(client)
    with pytest.raises(openai.BadRequestError, match="it is completed"):
        await client.responses.cancel(made.id)


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_client_that_vanishes_leaves_nothing(
    echo: EchoEngine, web: aiohttp.ClientSession, is_streaming: bool
) -> None:
    echo.scheduler.is_paused = True
    post = asyncio.ensure_future(web.post("/v1/responses", json=ASK | {"stream": is_streaming}))
    await first_step(echo, post)
    if is_streaming:
        (await post).close()
    else:
        post.cancel()
    await echo.until(lambda: bool(echo.scheduler.cancels))
    assert (echo.gateway.num_open, echo.scheduler.live) == (0, {})
    response_id = "resp_" + echo.scheduler.admitted[0].request_id.removesuffix("-0")
    async with web.get(f"/v1/responses/{response_id}") as answer:
        assert answer.status == 404


async def test_a_stream_that_fails_ends_with_a_failed_response(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    echo.scheduler.is_paused = True
    stream = asyncio.ensure_future(streamed(client))
    await first_step(echo, stream)
    await echo.until(lambda: len(echo.detokenizer.inbox) == 0)
    echo.scheduler.fail(StepError("it broke").info())
    events = await stream
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "it broke"
    assert (await client.responses.retrieve(last.response.id)).status == "failed"


async def test_a_whole_answer_that_fails_has_its_status(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    echo.scheduler.is_paused = True
    answer = asyncio.ensure_future(ask(client))
    await first_step(echo, answer)
    await echo.until(lambda: len(echo.detokenizer.inbox) == 0)
    echo.scheduler.fail(StepError("it broke").info())
    with pytest.raises(openai.InternalServerError, match="it broke"):
        await answer


async def test_a_bug_in_the_middle_of_a_stream_ends_it_with_a_failed_response(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = EventMaker.add
    calls = iter(range(5))

    def fail(maker: EventMaker, chunk: OutputChunk) -> list[Event]:
        if next(calls) == 2:
            raise RuntimeError("secret")
        return add(maker, chunk)

    monkeypatch.setattr(EventMaker, "add", fail)
    last = (await streamed(client))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "secret" not in last.response.error.message
    assert (await client.responses.retrieve(last.response.id)).status == "failed"


async def test_a_failure_before_the_first_event_has_its_own_status(
    client: openai.AsyncOpenAI,
) -> None:
    for body in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await client.responses.create(**(ASK | {"input": "x" * 600} | body))
        assert caught.value.param == "input"


async def test_a_draining_server_creates_no_responses_but_returns_stored_ones(
    echo: EchoEngine, client: openai.AsyncOpenAI
) -> None:
    made = await ask(client)
    echo.state.phase = "draining"
    for is_streaming in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client, stream=is_streaming)
        assert (caught.value.status_code, caught.value.code) == (503, "server_draining")
    assert await client.responses.retrieve(made.id) == made


async def test_a_queued_stream_says_that_it_was_created_and_is_kept_alive() -> None:
    async with EchoEngine(keep_alive_s=0.01) as echo, aiohttp.ClientSession(echo.url) as session:
        echo.scheduler.is_paused = True
        async with session.post("/v1/responses", json=ASK | {"stream": True}) as answer:
            frames = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
            assert frames[0].startswith(b"event: response.created")
            assert frames[2] == b": keep-alive\n\n"
            echo.scheduler.is_paused = False
            echo.scheduler.resume()
            assert b"event: response.completed" in await answer.read()


async def test_the_events_of_a_stream_are_not_stored(client: openai.AsyncOpenAI) -> None:
    made = await ask(client)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        await client.responses.retrieve(made.id, stream=True)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_0"}, "after"),
    ],
)
async def test_a_wrong_page_is_refused_by_name(
    client: openai.AsyncOpenAI, web: aiohttp.ClientSession, query: dict[str, str], param: str
) -> None:
    made = await ask(client)
    async with web.get(f"/v1/responses/{made.id}/input_items", params=query) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param
