"""Responses over a websocket: the official client's protocol, its errors and its ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pydantic
import pytest
from aiohttp import WSCloseCode, WSMsgType
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponsesServerEvent

from aserve.errors import ShuttingDown
from aserve.http.responses import websocket
from aserve.http.responses.body import ResponseBody
from aserve.http.responses.websocket import MAX_OPEN
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask as http_ask
from tests.http.asking import opened_requests, prompts

CLIENT_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponsesServerEvent)
CREATE: dict[str, Any] = {"type": "response.create", "model": "echo", "input": "hello 한"}
FINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


@pytest.fixture
async def socket(echo: EchoEngine) -> AsyncIterator[Socket]:
    async with echo.web.ws_connect("/v1/responses") as opened:
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


async def close_code(socket: Socket) -> int:
    message = await socket.receive()
    assert message.type == WSMsgType.CLOSE
    code: int = message.data
    return code


async def num_admitted(echo: EchoEngine, count: int) -> None:
    await echo.until(lambda: len(echo.scheduler.admitted) >= count)


# ------------------------------------------------------------ answers


async def test_the_latest_response_is_continued_though_it_is_not_stored(
    echo: EchoEngine, socket: Socket
) -> None:
    first = await ask(socket, input="a", store=False)
    previous = {"previous_response_id": first["response"]["id"], "store": False}
    async with echo.web.ws_connect("/v1/responses") as other:
        refused = await ask(other, input="b", **previous)
    assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
    assert text_of(await ask(socket, input="b", **previous)) == "u:a;a:u:a;;u:b;"
    forgotten = await ask(socket, input="c", **previous)
    assert forgotten["error"]["param"] == "previous_response_id"


async def test_another_socket_reads_a_resumable_response_from_any_event_on(
    echo: EchoEngine, socket: Socket
) -> None:
    await socket.send_json(CREATE | {"resumable": True, "stream_id": "left"})
    events = await answer_of(socket)
    subscribe = {"type": "response.subscribe", "response_id": events[0]["response"]["id"]}
    async with echo.web.ws_connect("/v1/responses") as other:
        for number in range(len(events) - 1):
            after = {"starting_after": number, "stream_id": "left"}
            await other.send_json(subscribe | after)
            assert await answer_of(other) == events[number + 1 :]
        await other.send_json(subscribe | {"response_id": "resp_none"})
        assert (await event_of(other))["error"]["code"] == "stream_not_found"
    assert {event["stream_id"] for event in events} == {"left"}


async def test_a_resumable_response_goes_on_without_its_socket(
    echo: EchoEngine, socket: Socket
) -> None:
    echo.scheduler.is_paused = True
    await socket.send_json(CREATE | {"resumable": True})
    await num_admitted(echo, 1)
    echo.scheduler.step()
    begun = [await event_of(socket) for _ in range(5)]
    await socket.close()
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    after = {"response_id": begun[0]["response"]["id"], "starting_after": 4}
    async with echo.web.ws_connect("/v1/responses") as other:
        await other.send_json({"type": "response.subscribe"} | after)
        rest = await answer_of(other)
    assert [event["sequence_number"] for event in begun + rest] == [*range(len(begun + rest))]
    assert text_of(rest[-1]) == "u:hello 한;"


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
    echo: EchoEngine, socket: Socket
) -> None:
    final = await ask(socket)
    assert (
        await echo.client.responses.retrieve(final["response"]["id"])
    ).output_text == "u:hello 한;"
    echo.scheduler.is_paused = True
    await socket.send_json(CREATE)
    await num_admitted(echo, 2)
    echo.scheduler.step()
    created = await event_of(socket)
    await echo.client.responses.cancel(created["response"]["id"])
    last = (await answer_of(socket))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


# ------------------------------------------------------------ errors


NOT_READ: list[tuple[str | bytes, str, str | None]] = [
    (b'{"type": "response.create"}', "unsupported_message", None),
    ("", "invalid_json", None),
    ("{", "invalid_json", None),
    ("[" * 100_000, "body_too_complex", None),
    ('{"input": ' + "[" * 100_000, "body_too_complex", None),
    ("[]", "invalid_type", None),
    ("{}", "unsupported_value", "type"),
    ('{"type": 5}', "invalid_type", "type"),
    ('{"type": "response.cancel"}', "unsupported_value", "type"),
]
WRONG_FIELDS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": None}, "missing_required_parameter", "input"),
    ({"input": 1}, "invalid_type", "input"),
    ({"model": "b"}, "model_not_found", "model"),
    ({"background": True}, "unsupported_parameter", "background"),
    ({"generate": False}, "unsupported_value", "generate"),
    ({"chat_template": "x"}, "unsupported_parameter", "chat_template"),
    ({"stream_id": "x" * 300}, "invalid_type", "stream_id"),
    ({"input": "x" * 600}, "context_length_exceeded", "input"),
]
HOSTILE = [*NOT_READ]
HOSTILE += [(json.dumps(CREATE | fields), code, param) for fields, code, param in WRONG_FIELDS]


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


@settings(max_examples=10)
@given(st.lists(BODIES.map(lambda body: CREATE | body) | JSON, min_size=5, max_size=5))
def test_every_message_gets_exactly_one_end(messages: list[Any]) -> None:
    async def scenario() -> None:
        async with EchoEngine() as echo, echo.web.ws_connect("/v1/responses") as socket:
            for message in messages:
                await socket.send_str(msgspec.json.encode(message).decode())
            await socket.send_json(CREATE | {"input": "the last"})
            ends = [(await answer_of(socket))[-1] for _ in range(len(messages) + 1)]
            assert text_of(ends[-1]) == "u:the last;"
            assert all(end["status"] < 500 for end in ends if end["type"] == "error")
            assert echo.gateway.num_open == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [2048, 2049])
async def test_a_message_that_is_too_large_closes_with_1009(size: int) -> None:
    async with (
        EchoEngine(max_body_size=2048) as echo,
        echo.web.ws_connect("/v1/responses") as socket,
    ):
        data = msgspec.json.encode(CREATE | {"max_output_tokens": 1}).decode()
        await socket.send_str(data + " " * (size - len(data.encode())))
        if size > 2048:
            assert await close_code(socket) == WSCloseCode.MESSAGE_TOO_BIG
        else:
            assert (await answer_of(socket))[-1]["type"] == "response.incomplete"


async def test_a_call_is_timed_from_its_own_message_on(
    echo: EchoEngine, socket: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_requests(echo, monkeypatch)
    sent_s = time.monotonic()
    await ask(socket, include_timings=True)
    assert opened[0].started_s is not None
    assert sent_s <= opened[0].started_s <= time.monotonic()


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
        echo.web.ws_connect("/v1/responses") as socket,
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


async def handshake_status(echo: EchoEngine, **headers: str) -> int:
    try:
        async with echo.web.ws_connect("/v1/responses", headers=headers) as socket:
            assert text_of(await ask(socket)) == "u:hello 한;"
    except aiohttp.WSServerHandshakeError as error:
        return error.status
    return 101


async def test_the_key_is_asked_for_before_the_upgrade() -> None:
    async with EchoEngine(api_key="sesame") as echo:
        assert await handshake_status(echo) == 401
        assert await handshake_status(echo, Authorization="Bearer sesame") == 101


async def test_a_plain_get_of_the_websocket_is_a_426(echo: EchoEngine) -> None:
    async with echo.web.get("/v1/responses") as answer:
        assert answer.status == 426
        assert (await answer.json())["error"]["code"] == "upgrade_required"


async def test_a_draining_server_accepts_no_new_websocket(echo: EchoEngine) -> None:
    echo.state.phase = "draining"
    assert await handshake_status(echo) == 503


# ------------------------------------------------------------ ends


async def test_a_lost_websocket_cancels_its_running_responses(echo: EchoEngine) -> None:
    echo.scheduler.is_paused = True
    socket = await echo.web.ws_connect("/v1/responses")
    for stream in ("left", "left", "right"):
        await socket.send_json(CREATE | {"stream_id": stream})
    await num_admitted(echo, 2)
    echo.scheduler.step()
    await event_of(socket)
    socket._response.connection.transport.abort()  # type: ignore[union-attr]  # it is open
    await echo.until(lambda: not echo.scheduler.live)
    assert len(echo.scheduler.cancels) == len(echo.scheduler.admitted) == 2
    assert echo.gateway.num_open == 0


async def test_a_client_that_answers_no_ping_is_disconnected_and_a_silent_one_stays() -> None:
    async with EchoEngine(heartbeat_s=0.2) as echo:
        echo.scheduler.is_paused = True
        async with (
            echo.web.ws_connect("/v1/responses", autoping=False) as silent,
            echo.web.ws_connect("/v1/responses") as reading,
        ):
            await silent.send_json(CREATE)
            await num_admitted(echo, 1)
            assert (await silent.receive()).type == WSMsgType.PING
            waiting = asyncio.ensure_future(answer_of(reading))  # it answers pings meanwhile
            await echo.until(lambda: bool(echo.scheduler.cancels))
            assert echo.gateway.num_open == 0
            echo.scheduler.is_paused = False
            await reading.send_json(CREATE)
            assert text_of((await waiting)[-1]) == "u:hello 한;"


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
    assert await close_code(socket) == WSCloseCode.GOING_AWAY


async def test_a_bug_ends_its_own_response_and_no_other_of_the_websocket(
    echo: EchoEngine, socket: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    echo.scheduler.is_paused = True
    await socket.send_json(CREATE | {"stream_id": "other"})
    await num_admitted(echo, 1)
    with monkeypatch.context() as broken:
        broken.setattr(websocket, "response_call", fail)
        broken.setattr(websocket, "change_of", fail)
        for message in (CREATE, {"type": "response.amend", "response_id": "x"}):
            await socket.send_json(message | {"stream_id": "bug"})
            error = await event_of(socket)
            assert (error["type"], error["status"], error["stream_id"]) == ("error", 500, "bug")
            assert (error["error"]["code"], "secret" in str(error)) == ("bug", False)
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    assert text_of((await answer_of(socket))[-1]) == "u:hello 한;"
    assert text_of(await ask(socket, stream_id="bug")) == "u:hello 한;"


@pytest.mark.slow
async def test_a_client_that_does_not_read_delays_nobody_else(
    echo: EchoEngine, socket: Socket
) -> None:
    """Its responses are more than all buffers on the way take, so that the last ones must wait."""
    count = 20
    for _ in range(count):
        await socket.send_json(CREATE | {"input": "0123456789" * 22, "top_logprobs": 20})

    def num_begun() -> int:
        return sum(request.sampling.logprobs == 20 for request in echo.scheduler.admitted)

    async with echo.web.ws_connect("/v1/responses") as other:
        begun, num_still = 0, 0
        while num_still < 30:  # far more answers than one of the others takes
            assert text_of(await ask(other)) == "u:hello 한;"
            num_still = num_still + 1 if num_begun() == begun else 0
            begun = num_begun()
    assert begun < count


async def test_if_20_of_40_websockets_disconnect_the_others_get_one_end_each(
    echo: EchoEngine,
) -> None:
    async def stay(number: int) -> list[str]:
        async with echo.web.ws_connect("/v1/responses") as socket:
            await socket.send_json(CREATE | {"input": f"stays {number}"})
            answer = await answer_of(socket)
            assert text_of(answer[-1]) == f"u:stays {number};"
            await socket.close()
            rest = [message async for message in socket]
            assert rest == []
            return [event["type"] for event in answer if event["type"] in FINAL]

    async def vanish(number: int) -> None:
        socket = await echo.web.ws_connect("/v1/responses")
        await socket.send_json(CREATE | {"input": f"vanishes {number} " + "x" * 300})
        for _ in range(number % 5):
            await event_of(socket)
        await socket.close()

    ends = await asyncio.gather(*map(stay, range(20)), *map(vanish, range(20)))
    assert ends[:20] == [["response.completed"]] * 20
    await echo.until(lambda: not echo.scheduler.live and not echo.gateway.num_open)
    assert echo.detokenizer.num_requests == 0


# ------------------------------------------------------------ changes


async def test_a_running_response_is_changed_and_forked(echo: EchoEngine, socket: Socket) -> None:
    """A change is answered at once, amid the stream; a fork is a response of its own."""
    echo.scheduler.is_paused = True
    await socket.send_json(CREATE | {"input": "one two stop three", "seed": 4})
    await num_admitted(echo, 1)
    [(request_id, _)] = echo.scheduler.live
    for _ in range(4):
        echo.scheduler.step()
    await echo.until(lambda: len(echo.gateway.outputs_of(request_id, 0)) == 16)
    response_id = (await event_of(socket))["response"]["id"]
    about = {"response_id": response_id, "stream_id": "x"}
    events: list[dict[str, Any]] = []
    for change in ({}, {"max_tokens": 10**6}, {"stop": ["stop"]}):
        await socket.send_json({"type": "response.amend"} | about | change)
    while "response.amended" not in [event["type"] for event in events]:
        events.append(msgspec.json.decode(await socket.receive_str()))
    await socket.send_json({"type": "response.fork", "token": 3, "token_id": 65, "seed": 5} | about)
    await num_admitted(echo, 2)
    known, fork = echo.gateway.outputs_of(request_id, 0), echo.scheduler.admitted[1]
    assert (fork.outputs, fork.sampling.seed) == ((known[:12] + b"A\0\0\0",), 5)
    assert fork.sampling.stop == ("stop",)
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    while sum(event["type"] == "response.completed" for event in events) < 2:
        events.append(msgspec.json.decode(await socket.receive_str()))
    [amended] = [event for event in events if event["type"] == "response.amended"]
    [choice] = amended["request"]["choices"]
    assert (amended["stream_id"], choice["completion_tokens"]) == ("x", 4)
    codes = {event["error"]["code"] for event in events if event["type"] == "error"}
    assert codes == {"missing_required_parameter", "refused_here"}
    texts = [text_of(event) for event in events if event["type"] == "response.completed"]
    assert sorted(texts) == ["u:oae two ", "u:one two "], "the echo goes on from its place"
    await socket.send_json({"type": "response.fork", "token": 1} | about)
    assert (await answer_of(socket))[-1]["error"]["code"] == "request_not_found"


async def test_a_fork_of_a_call_with_several_prompts_is_refused(
    echo: EchoEngine, socket: Socket
) -> None:
    echo.scheduler.is_paused = True
    body = {"prompt": ["a", "b"], "rid": "mine"}
    call = asyncio.ensure_future(http_ask(echo, "/v1/completions", body))
    await num_admitted(echo, 2)
    await socket.send_json({"type": "response.fork", "response_id": "mine", "token": 0})
    error = await event_of(socket)
    assert (error["status"], error["error"]["code"]) == (409, "conflict")
    echo.scheduler.is_paused = False
    echo.scheduler.resume()
    assert (await call).status == 200
