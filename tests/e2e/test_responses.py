"""Responses of a started server with the bundled model: official client, HTTP and websocket.

The server computes in float64, so that a text is the same whatever runs beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests.e2e.server_process import ServerProcess
from tests.e2e.test_openai_client import KEY, MODEL, QUIET, client_of, settled

pytestmark = pytest.mark.slow

ASK: dict[str, Any] = {"model": MODEL, "input": "Tell me a story.", "max_output_tokens": 24}
FINAL = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*QUIET, "--api-key", KEY) as started:
        yield started


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(server) as opened:
        yield opened


async def over_http(client: openai.AsyncOpenAI, seed: int, **body: Any) -> Response:
    response: Response = await client.responses.create(**(ASK | body), extra_body={"seed": seed})
    return response


async def send(connection: Any, **body: Any) -> None:
    await connection.send({"type": "response.create", **ASK, **body})


async def final_of(connection: Any) -> Any:
    async for event in connection:
        if event.type in FINAL:
            return event
    raise AssertionError("the socket closed without a final event")


async def test_streamed_whole_and_websocket_say_the_same(client: openai.AsyncOpenAI) -> None:
    whole = await over_http(client, 5)
    stream = await client.responses.create(**ASK, stream=True, extra_body={"seed": 5})
    events = [event async for event in stream]
    async with client.responses.connect() as connection:
        await send(connection, seed=5)
        told: list[Any] = []
        async for event in connection:
            told.append(event)
            if event.type in FINAL:
                break
    assert whole.output_text
    for answer in (events, told):
        deltas = [each.delta for each in answer if each.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text == answer[-1].response.output_text
        assert [each.sequence_number for each in answer] == list(range(len(answer)))
        assert answer[-1].response.status == whole.status
        assert answer[-1].response.usage.output_tokens == 24


async def test_a_conversation_continues_from_what_was_kept(client: openai.AsyncOpenAI) -> None:
    first = await over_http(client, 1, input="My name is Ada.", instructions="Be brief.")
    second = await over_http(client, 2, input="What is my name?", previous_response_id=first.id)
    said = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    assert (await over_http(client, 2, input=said)).output_text == second.output_text
    assert (await client.responses.retrieve(second.id)) == second
    items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item.type for item in items] == ["message"] * 3
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)


class Weather(pydantic.BaseModel):
    is_warm: bool
    sky: Literal["clear", "cloudy"]


async def test_an_output_keeps_to_its_type(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.parse(
        model=MODEL, input="The weather?", text_format=Weather, temperature=1.5
    )
    assert isinstance(response.output_parsed, Weather)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(
            model=MODEL,
            input="a",
            text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "cat"}}},
        )
    assert (caught.value.param or "").startswith("text.format")


async def test_a_wrong_key_opens_no_websocket(server: ServerProcess) -> None:
    from websockets.exceptions import InvalidStatus

    async with client_of(server, api_key="wrong") as client:
        with pytest.raises(InvalidStatus) as caught:
            async with client.responses.connect():
                pass
    assert caught.value.response.status_code == 401


async def test_an_error_on_a_socket_leaves_it_open(client: openai.AsyncOpenAI) -> None:
    async with client.responses.connect() as connection:
        await connection.response.create(model=MODEL, input="a", previous_response_id="resp_0")
        error = await connection.recv()
        assert error.type == "error"
        assert (error.status, error.error.code) == (400, "previous_response_not_found")
        await connection.response.create(**ASK)
        assert (await final_of(connection)).type == "response.incomplete"


async def test_if_50_of_100_websockets_disconnect_the_others_get_one_end_each(
    server: ServerProcess, client: openai.AsyncOpenAI
) -> None:
    alone = {number: (await over_http(client, number)).output_text for number in (0, 49)}

    async def stay(number: int) -> str:
        async with client.responses.connect() as connection:
            await send(connection, seed=number)
            final = await final_of(connection)
            assert final.type == "response.incomplete"
            await send(connection, type="to see that nothing else came")
            assert (await connection.recv()).type == "error"
            text: str = final.response.output_text
            return text

    async def vanish(number: int) -> None:
        async with client.responses.connect() as connection:
            await send(connection, max_output_tokens=400, ignore_eos=True)
            for _ in range(5 + number % 4):
                await connection.recv()

    texts = await asyncio.gather(*map(stay, range(50)), *map(vanish, range(50)))
    assert {number: texts[number] for number in alone} == alone
    assert len(set(texts[:50])) > 45
    await settled(server)


async def test_sigterm_fails_what_runs_and_closes_every_socket_as_gone_away() -> None:
    from websockets.exceptions import ConnectionClosed

    with ServerProcess(*QUIET, "--drain-timeout", "0.3") as server:
        async with (
            client_of(server) as client,
            client.responses.connect() as idle,
            client.responses.connect() as busy,
        ):
            await send(busy, max_output_tokens=900, ignore_eos=True)
            assert (await busy.recv()).type == "response.created"
            ending = asyncio.ensure_future(asyncio.to_thread(server.end))
            assert (await final_of(busy)).type == "response.failed"
            for connection in (idle, busy):
                with pytest.raises(ConnectionClosed) as caught:
                    await connection.recv_bytes()
                assert caught.value.rcvd is not None
                assert caught.value.rcvd.code == 1001
            code, took_s = await ending
        assert code == 0
        assert took_s < 5
