"""One of two frontends has stopped: it listens, but answers nothing. The other one names it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from aserve.host.threads import new_event_loop
from aserve.http import frontend_requests
from aserve.http.peers import EXPIRES, FORWARDED, Peers
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import Answer, ask, bearer
from tests.http.unread_client import UnreadClient

ROOT = bearer("root")
ASKED_OF_ALL: list[tuple[str, Any]] = [
    ("/metrics", None),
    ("/load", None),
    ("/is_paused", None),
    ("/v1/requests", None),
    (f"/v1/requests/{'0' * 32}", None),
    ("/abort_request", {"abort_all": True}),
    ("/pause_generation", {"mode": "abort"}),
    ("/pause_generation", {"mode": "wait", "timeout": 0.1}),
    ("/pause?mode=abort", b""),
    ("/continue_generation", {}),
]


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(Peers(0, str(tmp_path)).socket_of(1))
        listener.listen(8)
        yield listener


@pytest.fixture
async def first(
    stopped: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EchoEngine]:
    monkeypatch.setattr(frontend_requests, "ANSWER_S", 0.1)
    peers = Peers(0, str(tmp_path), "secret")
    async with EchoEngine(admin_api_key="root", peers=peers) as engine:
        yield engine


@pytest.fixture
async def further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EchoEngine]:
    """The first one has stopped."""
    monkeypatch.setattr(frontend_requests, "ANSWER_S", 0.1)
    peers = Peers(1, str(tmp_path), "secret")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(peers.socket_of(0))
        listener.listen(8)
        options: dict[str, Any] = {"admin_api_key": "root", "write_timeout": 0.2}
        async with EchoEngine(peers=peers, **options) as engine:
            yield engine


@pytest.fixture
def first_socket(tmp_path: Path) -> str:
    return Peers(0, str(tmp_path)).socket_of(0)


def assert_names_it(answer: Answer, number: int = 1) -> None:
    assert (answer.status, answer.error["code"]) == (503, "frontend_silent"), answer.text
    assert answer.error["message"].startswith(f"Frontends [{number}] have not answered")


@pytest.mark.parametrize(("path", "body"), ASKED_OF_ALL)
async def test_what_all_frontends_are_asked_ends_with_an_error_that_names_the_stopped_one(
    first: EchoEngine, path: str, body: Any
) -> None:
    assert_names_it(await ask(first, path, body, headers=ROOT))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/v1/responses/resp_{'0' * 32}"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/update_weights_from_disk"),
        ("PATCH", "/settings"),
        ("POST", f"/v1/requests/{'0' * 32}/fork"),
    ],
)
async def test_what_one_frontend_forwards_to_a_stopped_one_ends_with_an_error_that_names_it(
    further: EchoEngine, method: str, path: str
) -> None:
    assert_names_it(await ask(further, path, {}, method=method, headers=ROOT), 0)


async def test_a_websocket_that_is_forwarded_to_a_stopped_frontend_is_refused(
    further: EchoEngine,
) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        await further.web.ws_connect("/v1/responses", headers=ROOT)
    assert refusal.value.status == 503


async def test_an_answer_that_begins_late_is_awaited_as_long_as_its_frontend_answers_probes(
    further: EchoEngine, tmp_path: Path
) -> None:
    peers = Peers(0, str(tmp_path), "secret")
    os.unlink(peers.socket_of(0))
    async with EchoEngine(admin_api_key="root", peers=peers) as slow:
        slow.scheduler.is_paused = True
        body = {"model": "echo", "input": "abc"}
        asked = asyncio.ensure_future(ask(further, "/v1/responses", body, headers=ROOT))
        await asyncio.wait([asked], timeout=0.5)
        assert not asked.done()
        slow.scheduler.is_paused = False
        slow.scheduler.resume()
        assert (await asked).status == 200


class BegunStream:
    """A frontend that begins an answer and sends no more. It answers probes while it `is_alive`."""

    def __init__(self, content_type: str, begun: bytes) -> None:
        self.is_alive = True
        self.may_end = asyncio.Event()
        self.asked_again = asyncio.Event()
        self._content_type = content_type
        self._begun = begun
        self._num_probes = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": self._content_type})
        await response.prepare(request)
        await response.write(self._begun)
        await self.may_end.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def probe(self, _: web.Request) -> web.Response:
        self._num_probes += 1
        if self._num_probes > 1:
            self.asked_again.set()
        if not self.is_alive:
            await self.may_end.wait()
        return web.Response()

    @contextlib.asynccontextmanager
    async def at(self, path: str) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get(frontend_requests.PROBE, self.probe)
        app.router.add_post("/v1/responses", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        os.unlink(path)
        await web.UnixSite(runner, path).start()
        yield
        self.may_end.set()
        await runner.cleanup()


EVENT = b'event: response.created\ndata: {"sequence_number": 0}\n\n'


@contextlib.asynccontextmanager
async def begun(further: EchoEngine) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"model": "echo", "input": "abc", "stream": True}
    async with (
        asyncio.timeout(5),
        further.web.post("/v1/responses", json=body, headers=ROOT) as answer,
    ):
        yield answer


def error_code(event: str) -> str:
    code: str = json.loads(event.partition("data: ")[2])["code"]
    return code


async def test_a_stream_of_a_frontend_that_stops_ends_with_an_error_event(
    further: EchoEngine, first_socket: str
) -> None:
    stream = BegunStream("text/event-stream; charset=utf-8", EVENT)
    async with stream.at(first_socket), begun(further) as answer:
        assert await answer.content.readuntil(b"\n\n") == EVENT
        stream.is_alive = False
        assert error_code(await answer.text()) == "frontend_silent"


async def test_half_an_answer_of_a_frontend_that_stops_is_not_taken_for_a_whole_one(
    further: EchoEngine, first_socket: str
) -> None:
    stream = BegunStream("application/json", b'{"id": ')
    stream.is_alive = False
    async with stream.at(first_socket), begun(further) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.text()


async def test_a_silent_stream_goes_on_while_its_frontend_answers_probes(
    further: EchoEngine, first_socket: str
) -> None:
    stream = BegunStream("text/event-stream", EVENT)
    async with stream.at(first_socket), begun(further) as answer:
        await stream.asked_again.wait()
        stream.may_end.set()
        assert await answer.read() == EVENT + b"data: [DONE]\n\n"


async def test_a_stream_of_a_frontend_that_ends_within_it_ends_with_an_error_event(
    further: EchoEngine, first_socket: str
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"

    def end_within_it(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%b\r\n\r\n%x\r\n%b\r\n" % (head, len(EVENT), EVENT))
        writer.close()

    os.unlink(first_socket)
    async with (
        await asyncio.start_unix_server(end_within_it, first_socket),
        begun(further) as answer,
    ):
        assert await answer.content.readuntil(b"\n\n") == EVENT
        assert error_code(await answer.text()) == "frontend_ended"


class EndlessStream(BegunStream):
    """A frontend that writes as long as it is read. `is_over` when nobody reads any more."""

    def __init__(self) -> None:
        super().__init__("text/event-stream", EVENT)
        self.is_over = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(EVENT * 1000)
        self.is_over.set()
        return response


async def test_a_passed_on_stream_that_is_not_read_is_closed(
    further: EchoEngine, first_socket: str
) -> None:
    stream = EndlessStream()
    async with stream.at(first_socket), UnreadClient(further.url) as client:
        await client.post("/v1/responses", {"model": "echo", "input": "abc", "stream": True})
        async with asyncio.timeout(30):
            await stream.is_over.wait()
        assert b"frontend_" not in await client.read_all()


async def test_an_update_of_the_weights_that_a_stopped_frontend_holds_up_changes_nothing(
    first: EchoEngine,
) -> None:
    for _ in range(2):
        body = {"model_path": "/", "abort_all_requests": True}
        assert_names_it(await ask(first, "/update_weights_from_disk", body, headers=ROOT))
    assert (await ask(first, "/v1/completions", {"prompt": "abc"})).status == 200


def test_a_stopped_frontend_with_too_many_connections_has_not_ended(
    stopped: socket.socket, tmp_path: Path
) -> None:
    """The kernel refuses them at once, and uvloop passes that on."""

    async def ask_for_metrics() -> Answer:
        async with EchoEngine(peers=Peers(0, str(tmp_path), "secret")) as engine:
            return await ask(engine, "/metrics")

    stopped.listen(0)
    with contextlib.ExitStack() as stack, asyncio.Runner(loop_factory=new_event_loop) as runner:
        for _ in range(2):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect_ex(stopped.getsockname())
        assert_names_it(runner.run(ask_for_metrics()))


async def test_no_client_of_several_frontends_pauses_them_until_an_update_ends(
    first: EchoEngine, stopped: socket.socket
) -> None:
    os.unlink(stopped.getsockname())
    answer = await ask(first, "/pause_generation", {"until_updated": True}, headers=ROOT)
    assert answer.status == 400
    assert not first.state.is_held


async def test_a_frontend_that_goes_on_does_nothing_of_what_it_was_asked_long_ago(
    first: EchoEngine, stopped: socket.socket
) -> None:
    shared: list[None] = []
    first.state.share = lambda: shared.append(None)
    forwarded = ROOT | {FORWARDED: "secret 127.0.0.1"}
    late = forwarded | {EXPIRES: f"{time.monotonic() - 1}"}
    answer = await ask(first, "/pause_generation", {"mode": "abort"}, headers=late)
    assert answer.status == 503
    assert not first.state.is_held
    assert shared, "the others may have been paused"
    os.unlink(stopped.getsockname())
    spoofed = ROOT | {EXPIRES: "0"}
    for headers in (forwarded, spoofed):
        answer = await ask(first, "/pause_generation", {"mode": "abort"}, headers=headers)
        assert answer.status == 200, answer.text
