"""Responses over a websocket: the official client's protocol, its errors and its ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import openai
import pydantic
import pytest
from aiohttp import WSCloseCode, WSMsgType
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponsesServerEvent

from aserve.errors import ShuttingDown
from aserve.http.responses.body import ResponseBody
from aserve.http.responses.events import EventMaker
from aserve.http.responses.websocket import MAX_OPEN
from aserve.messages.base import array_i32
from tests.fakes.echo_engine import EchoEngine

CLIENT_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponsesServerEvent)
CREATE: dict[str, Any] = {"type": "response.create", "model": "echo", "input": "hello 한"}
FINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


@pytest.fixture
async def socket(web: aiohttp.ClientSession) -> AsyncIterator[Socket]:
    async with web.ws_connect("/v1/responses") as opened:
        yield opened


Socket = aiohttp.ClientWebSocketResponse


async def event_of(socket: Socket) -> dict[str, Any]:
    """The next one, checked strictly against the client's own types."""
    data = await socket.receive_str()
    CLIENT_EVENT.validate_json(data, strict=True)
    event: dict[str, Any] = msgspec.json.decode(data)
    return event


async def answer_of(socket: Socket) -> list[dict[str, Any]]:
    """Up to the final event."""
    events = [await event_of(socket)]
    while events[-1]["type"] not in FINAL:
        events.append(await event_of(socket))
    return events


async def ask(socket: Socket, **body: Any) -> dict[str, Any]:
    """The final event."""
    await socket.send_json(CREATE | body)
    return (await answer_of(socket))[-1]


def text_of(final: dict[str, Any]) -> str:
    text: str = final["response"]["output"][0]["content"][0]["text"]
    return text


def prompts(echo: EchoEngine) -> list[str]:
    ids = [array_i32(request.prompt_ids).tolist() for request in echo.scheduler.admitted]
    return [echo.tokenizer.decode(each) for each in ids]


async def num_admitted(echo: EchoEngine, count: int) -> None:
    await echo.until(lambda: len(echo.scheduler.admitted) >= count)


# ------------------------------------------------------------ answers


async def test_the_official_client_gets_its_responses_in_order(
    client: openai.AsyncOpenAI,
) -> None:
    async with client.responses.connect() as connection:
        for text in ("one", "two", "three"):
            await connection.response.create(model="echo", input=text)
        ended: list[str] = []
        async for event in connection:
            if event.type == "response.completed":
                ended.append(event.response.output_text)
                if len(ended) == 3:
                    break
    assert ended == ["u:one;", "u:two;", "u:three;"]


async def test_a_websocket_has_the_same_events_as_a_stream(
    client: openai.AsyncOpenAI, socket: Socket
) -> None:
    body: dict[str, Any] = {"top_logprobs": 2, "max_output_tokens": 7, "seed": 3, "store": False}
    stream = await client.responses.create(
        model="echo", input="hello 한", stream=True, extra_body=body
    )
    streamed = [without_ids(event.to_dict()) async for event in stream]
    await socket.send_json(CREATE | body)
    told = [without_ids(event) for event in await answer_of(socket)]
    assert deltas_joined(told) == deltas_joined(streamed)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        ids = {"id", "item_id", "created_at"}
        return {name: without_ids(each) for name, each in value.items() if name not in ids}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def deltas_joined(events: list[Any]) -> list[Any]:
    """How many there are depends on who was faster; then numbers mean nothing either."""
    kind = "response.output_text.delta"
    deltas = [event for event in events if event["type"] == kind]
    others = [{**event, "sequence_number": 0} for event in events if event["type"] != kind]
    text = "".join(event["delta"] for event in deltas)
    return [*others, text, [entry for event in deltas for entry in event["logprobs"]]]


async def test_the_latest_response_is_continued_though_it_is_not_stored(
    echo: EchoEngine, web: aiohttp.ClientSession, socket: Socket
) -> None:
    first = await ask(socket, input="a", store=False)
    previous = {"previous_response_id": first["response"]["id"], "store": False}
    async with web.ws_connect("/v1/responses") as other:
        refused = await ask(other, input="b", **previous)
    assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
    assert text_of(await ask(socket, input="b", **previous)) == "u:a;a:u:a;;u:b;"
    forgotten = await ask(socket, input="c", **previous)
    assert forgotten["error"]["param"] == "previous_response_id"


async def test_one_stream_waits_for_its_turn_and_another_does_not(
    echo: EchoEngine, socket: Socket
) -> None:
    echo.scheduler.is_paused = True
    for stream, text in (("left", "1"), ("left", "2"), ("right", "3")):
        await socket.send_json(CREATE | {"input": text, "stream_id": stream})
    await num_admitted(echo, 2)
    assert prompts(echo) == ["u:1;", "u:3;"]
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    ended: list[dict[str, Any]] = []
    while len(ended) < 3:
        event = await event_of(socket)
        ended += [event] if event["type"] in FINAL else []
    texts = [(event["stream_id"], text_of(event)) for event in ended]
    assert sorted(texts) == [("left", "u:1;"), ("left", "u:2;"), ("right", "u:3;")]
    assert texts.index(("left", "u:1;")) < texts.index(("left", "u:2;"))


async def test_responses_of_a_websocket_are_read_and_cancelled_over_http(
    echo: EchoEngine, client: openai.AsyncOpenAI, socket: Socket
) -> None:
    final = await ask(socket)
    assert (await client.responses.retrieve(final["response"]["id"])).output_text == "u:hello 한;"
    echo.scheduler.is_paused = True
    await socket.send_json(CREATE)
    await num_admitted(echo, 2)
    echo.scheduler.step()
    created = await event_of(socket)
    await client.responses.cancel(created["response"]["id"])
    last = (await answer_of(socket))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


# ------------------------------------------------------------ errors


HOSTILE: list[tuple[str | bytes, str, str | None]] = [
    (b'{"type": "response.create"}', "unsupported_message", None),
    ("", "invalid_json", None),
    ("{", "invalid_json", None),
    ("[" * 100_000, "body_too_complex", None),
    ('{"input": ' + "[" * 100_000, "body_too_complex", None),
    ("[]", "invalid_type", None),
    ("{}", "unsupported_value", "type"),
    ('{"type": 5}', "invalid_type", "type"),
    ('{"type": "response.cancel"}', "unsupported_value", "type"),
    ('{"type": "response.create"}', "missing_required_parameter", "input"),
    ('{"type": "response.create", "input": 1}', "invalid_type", "input"),
    ('{"type": "response.create", "input": "a", "model": "b"}', "model_not_found", "model"),
    (
        '{"type": "response.create", "input": "a", "background": true}',
        "unsupported_parameter",
        "background",
    ),
    (
        '{"type": "response.create", "input": "a", "generate": false}',
        "unsupported_value",
        "generate",
    ),
    ('{"type": "response.create", "stream_id": "%s"}' % ("x" * 300), "invalid_type", "stream_id"),
    (
        '{"type": "response.create", "input": "%s"}' % ("x" * 600),
        "context_length_exceeded",
        "input",
    ),
]


async def test_a_wrong_message_gets_one_error_in_order_and_the_websocket_stays_open(
    socket: Socket,
) -> None:
    for data, _, _ in HOSTILE:
        await (socket.send_bytes(data) if isinstance(data, bytes) else socket.send_str(data))
    await socket.send_json(CREATE)
    for data, code, param in HOSTILE:
        error = await event_of(socket)
        assert error["type"] == "error", data[:100]
        assert (error["error"]["code"], error["error"]["param"]) == (code, param), data[:100]
        assert error["status"] == (404 if code == "model_not_found" else 400)
        assert len(error["error"]["message"]) < 1000
    assert text_of((await answer_of(socket))[-1]) == "u:hello 한;"


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(sorted(ResponseBody.__struct_encode_fields__))
BODIES = st.dictionaries(FIELDS, JSON, max_size=3)


@settings(max_examples=20)
@given(st.lists(BODIES.map(lambda body: CREATE | body) | JSON, min_size=5, max_size=5))
def test_every_message_gets_exactly_one_end(messages: list[Any]) -> None:
    async def scenario() -> None:
        async with (
            EchoEngine() as echo,
            aiohttp.ClientSession(echo.url) as session,
            session.ws_connect("/v1/responses") as socket,
        ):
            for message in messages:
                await socket.send_str(msgspec.json.encode(message).decode())
            await socket.send_json(CREATE | {"input": "the last"})
            ends = [(await answer_of(socket))[-1] for _ in range(len(messages) + 1)]
            assert text_of(ends[-1]) == "u:the last;"
            assert all(end["status"] < 500 for end in ends if end["type"] == "error")
            assert echo.gateway.num_open == 0

    asyncio.run(scenario())


async def test_an_error_names_its_stream(socket: Socket) -> None:
    error = await ask(socket, stream_id="left", input=[])
    assert (error["type"], error["stream_id"]) == ("error", "left")


@pytest.mark.parametrize("size", [2048, 2049])
async def test_a_message_that_is_too_large_closes_with_1009(size: int) -> None:
    async with (
        EchoEngine(max_body_size=2048) as echo,
        aiohttp.ClientSession(echo.url) as session,
        session.ws_connect("/v1/responses") as socket,
    ):
        data = msgspec.json.encode(CREATE | {"max_output_tokens": 1}).decode()
        await socket.send_str(data + " " * (size - len(data.encode())))
        if size > 2048:
            message = await socket.receive()
            assert (message.type, message.data) == (WSMsgType.CLOSE, WSCloseCode.MESSAGE_TOO_BIG)
        else:
            assert (await answer_of(socket))[-1]["type"] == "response.incomplete"


async def test_more_than_may_wait_are_429_at_once(echo: EchoEngine, socket: Socket) -> None:
    echo.scheduler.is_paused = True
    for _ in range(MAX_OPEN + 1):
        await socket.send_json(CREATE | {"max_output_tokens": 1})
    error = await event_of(socket)
    assert (error["status"], error["error"]["code"]) == (429, "queue_full")
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    ended = [(await answer_of(socket))[-1]["type"] for _ in range(MAX_OPEN)]
    assert ended == ["response.incomplete"] * MAX_OPEN


async def test_waiting_requests_are_also_bounded_in_bytes() -> None:
    async with (
        EchoEngine(max_body_size=2048) as echo,
        aiohttp.ClientSession(echo.url) as session,
        session.ws_connect("/v1/responses") as socket,
    ):
        echo.scheduler.is_paused = True
        for count in range(4):
            await socket.send_json(CREATE | {"metadata": {"a": "x" * 500, "b": "x" * 300}})
            await num_admitted(echo, min(count + 1, 1))
        assert (await event_of(socket))["error"]["code"] == "queue_full"
        echo.scheduler.is_paused = False
        echo.scheduler.resume()
        for _ in range(3):
            assert (await answer_of(socket))[-1]["type"] == "response.completed"


# ------------------------------------------------------------ who may connect


async def test_the_key_is_asked_for_before_the_upgrade() -> None:
    async with EchoEngine(api_key="sesame") as echo, aiohttp.ClientSession(echo.url) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect("/v1/responses")
        assert caught.value.status == 401
        headers = {"Authorization": "Bearer sesame"}
        async with session.ws_connect("/v1/responses", headers=headers) as socket:
            assert text_of(await ask(socket)) == "u:hello 한;"


async def test_a_page_with_another_origin_may_not_connect(
    echo: EchoEngine, web: aiohttp.ClientSession
) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await web.ws_connect("/v1/responses", origin="http://evil.example")
    assert caught.value.status == 403
    async with web.ws_connect("/v1/responses", origin=echo.url) as socket:
        assert text_of(await ask(socket)) == "u:hello 한;"


async def test_a_plain_get_of_the_websocket_is_a_426(web: aiohttp.ClientSession) -> None:
    async with web.get("/v1/responses") as answer:
        assert answer.status == 426
        assert (await answer.json())["error"]["code"] == "upgrade_required"


async def test_a_draining_server_accepts_no_new_websocket(
    echo: EchoEngine, web: aiohttp.ClientSession
) -> None:
    echo.state.phase = "draining"
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await web.ws_connect("/v1/responses")
    assert caught.value.status == 503


# ------------------------------------------------------------ ends


@pytest.mark.parametrize("how", ["closed", "lost"])
async def test_a_closed_websocket_cancels_its_running_responses(
    echo: EchoEngine, web: aiohttp.ClientSession, how: str
) -> None:
    echo.scheduler.is_paused = True
    socket = await web.ws_connect("/v1/responses")
    for stream in ("left", "left", "right"):
        await socket.send_json(CREATE | {"stream_id": stream})
    await num_admitted(echo, 2)
    echo.scheduler.step()
    await event_of(socket)
    if how == "closed":
        await socket.close()
    else:
        socket._response.connection.transport.abort()  # type: ignore[union-attr]  # it is open
    await echo.until(lambda: not echo.scheduler.live)
    assert len(echo.scheduler.cancels) == len(echo.scheduler.admitted) == 2
    assert echo.gateway.num_open == 0


async def test_a_client_that_answers_no_ping_is_disconnected() -> None:
    async with (
        EchoEngine(heartbeat_s=0.05) as echo,
        aiohttp.ClientSession(echo.url) as session,
        session.ws_connect("/v1/responses", autoping=False) as socket,
    ):
        echo.scheduler.is_paused = True
        await socket.send_json(CREATE)
        await num_admitted(echo, 1)
        assert (await socket.receive()).type == WSMsgType.PING
        await echo.until(lambda: bool(echo.scheduler.cancels))
        assert echo.gateway.num_open == 0


@pytest.mark.slow
async def test_a_silent_client_that_answers_pings_stays_connected() -> None:
    async with (
        EchoEngine(heartbeat_s=0.5) as echo,
        aiohttp.ClientSession(echo.url) as session,
        session.ws_connect("/v1/responses", autoping=False) as socket,
    ):
        for _ in range(2):
            ping = await socket.receive()
            assert ping.type == WSMsgType.PING
            await socket.pong(ping.data)
        assert text_of(await ask(socket)) == "u:hello 한;"


async def test_a_draining_server_finishes_running_responses_refuses_waiting_ones_and_closes(
    echo: EchoEngine, socket: Socket
) -> None:
    echo.scheduler.is_paused = True
    for stream in ("left", "right", "right"):
        await socket.send_json(CREATE | {"stream_id": stream})
    await num_admitted(echo, 2)
    echo.scheduler.step()
    await event_of(socket)
    echo.state.phase = "draining"
    echo.gateway.end_all(ShuttingDown("closing").info())
    ends = [(await answer_of(socket))[-1] for _ in range(3)]
    assert [end["type"] for end in ends] == ["response.failed", "response.failed", "error"]
    assert (ends[2]["stream_id"], ends[2]["error"]["code"]) == ("right", "server_draining")
    message = await socket.receive()
    assert (message.type, message.data) == (WSMsgType.CLOSE, WSCloseCode.GOING_AWAY)


async def test_a_stopping_server_closes_idle_websockets() -> None:
    async with EchoEngine() as echo, aiohttp.ClientSession(echo.url) as session:
        sockets = [await session.ws_connect("/v1/responses") for _ in range(3)]
        stopping = asyncio.ensure_future(echo.server.stop())
        for socket in sockets:
            message = await socket.receive()
            assert (message.type, message.data) == (WSMsgType.CLOSE, WSCloseCode.GOING_AWAY)
        await stopping


async def test_a_bug_is_an_opaque_error_and_closes_the_websocket(
    socket: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(EventMaker, "add", fail)
    await socket.send_json(CREATE)
    error = await event_of(socket)
    assert (error["type"], error["status"]) == ("error", 500)
    assert "secret" not in error["error"]["message"]
    message = await socket.receive()
    assert (message.type, message.data) == (WSMsgType.CLOSE, WSCloseCode.INTERNAL_ERROR)


@pytest.mark.slow
async def test_a_client_that_does_not_read_delays_nobody_else(
    echo: EchoEngine, web: aiohttp.ClientSession, socket: Socket
) -> None:
    """Its responses are more than all buffers on the way take, so that the last ones must wait."""
    count = 20
    for _ in range(count):
        await socket.send_json(CREATE | {"input": "0123456789" * 22, "top_logprobs": 20})

    def num_begun() -> int:
        return sum(request.sampling.logprobs == 20 for request in echo.scheduler.admitted)

    async with web.ws_connect("/v1/responses") as other:
        begun, num_still = 0, 0
        while num_still < 60:  # far more answers than one of the others takes
            assert text_of(await ask(other)) == "u:hello 한;"
            num_still = num_still + 1 if num_begun() == begun else 0
            begun = num_begun()
    assert begun < count
    ended = 0
    while ended < count:
        ended += '"response.completed"' in await socket.receive_str()


async def test_if_50_of_100_websockets_disconnect_the_others_get_one_end_each(
    echo: EchoEngine, web: aiohttp.ClientSession
) -> None:
    async def stay(number: int) -> list[str]:
        async with web.ws_connect("/v1/responses") as socket:
            await socket.send_json(CREATE | {"input": f"stays {number}"})
            answer = await answer_of(socket)
            assert text_of(answer[-1]) == f"u:stays {number};"
            await socket.close()
            rest = [message async for message in socket]
            assert rest == []
            return [event["type"] for event in answer if event["type"] in FINAL]

    async def vanish(number: int) -> None:
        socket = await web.ws_connect("/v1/responses")
        await socket.send_json(CREATE | {"input": f"vanishes {number} " + "x" * 300})
        for _ in range(number % 5):
            await event_of(socket)
        await socket.close()

    ends = await asyncio.gather(*map(stay, range(50)), *map(vanish, range(50)))
    assert ends[:50] == [["response.completed"]] * 50
    await echo.until(lambda: not echo.scheduler.live and not echo.gateway.num_open)
    assert echo.detokenizer.num_requests == 0
