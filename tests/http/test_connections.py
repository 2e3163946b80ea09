"""Connections have deadlines and a bound, and what is no HTTP is answered as everything else is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import pytest

from aserve.host.threads import new_event_loop
from aserve.http.connection import ConnectionLimits, Connections, open_port
from tests.fakes.echo_engine import EchoEngine

SOON_S = 0.05
LONG_S = 60.0
END_S = 10.0  # far more than any deadline here
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
NEVER: dict[str, Any] = {"prompt": "hello", "max_tokens": 3}


class Client:
    """One connection, byte by byte."""

    opened: ClassVar[list[Client]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.opened.append(self)

    @classmethod
    async def connect(cls, echo: EchoEngine, first: bytes = b"") -> Client:
        port = int(echo.url.rpartition(":")[2])
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        client.writer.write(first)
        return client

    async def rest(self) -> bytes:
        """Everything until the server closes the connection, or resets it because more was sent."""
        received = b""
        async with asyncio.timeout(END_S):
            with contextlib.suppress(ConnectionResetError):
                while data := await self._reader.read(1 << 16):
                    received += data
        return received

    async def head(self) -> bytes:
        async with asyncio.timeout(END_S):
            return await self._reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> tuple[int, Any]:
        """Status and body of one answer."""
        head = await self.head()
        async with asyncio.timeout(END_S):
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            return int(head.split()[1]), json.loads(await self._reader.readexactly(size))


@pytest.fixture(autouse=True)
async def _no_connection_is_left() -> AsyncIterator[None]:
    yield
    for client in Client.opened:
        client.writer.close()
    Client.opened.clear()


def answer_in(data: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert b"Server: aserve" in head
    assert b"X-Request-Id: " in head
    assert head.startswith(b"HTTP/1.0 ") or b"Connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


async def test_a_connection_that_sends_nothing_is_closed_without_an_answer() -> None:
    async with EchoEngine(header_timeout=SOON_S, keep_alive_timeout=LONG_S) as echo:
        client = await Client.connect(echo)
        assert await client.rest() == b""


@pytest.mark.parametrize("sent", [GET[:1], GET[:-1]])
@pytest.mark.parametrize("is_first", [True, False])
async def test_half_a_head_is_a_408_and_the_connection_ends(sent: bytes, is_first: bool) -> None:
    async with EchoEngine(header_timeout=SOON_S, keep_alive_timeout=LONG_S) as echo:
        client = await Client.connect(echo)
        if not is_first:
            client.writer.write(GET)
            assert (await client.answer())[0] == 200
        client.writer.write(sent)
        status, error = answer_in(await client.rest())
        assert (status, error["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_of_http_1_0_sees_the_end_of_every_answer(streams: bool) -> None:
    """Without a length only the close ends an answer, also if the client keeps connections."""
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": streams}).encode()
    head = (
        "POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    async with EchoEngine(keep_alive_timeout=LONG_S) as echo:
        client = await Client.connect(echo, head + body)
        if streams:
            assert (await client.rest()).endswith(b"data: [DONE]\n\n")
            return
        for _ in range(2):
            assert (await client.answer())[0] == 200
            client.writer.write(head + body)


def expecting(what: str, path: str = "/v1/completions", **headers: object) -> bytes:
    """The head of a request whose client holds back its body."""
    given = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": 9}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, f"Expect: {what}", "", ""]).encode()


@pytest.mark.parametrize("expected", ["100-continue", "100-Continue"])
async def test_a_body_is_asked_for_when_the_head_is_good(expected: str) -> None:
    """Whatever bytes other headers have."""
    body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    async with EchoEngine() as echo:
        client = await Client.connect(echo)
        for _ in range(2):
            head = expecting(expected, Content_Length=len(body), X_Name="\xe9t\xe9")
            client.writer.write(head.decode().encode("latin-1"))
            assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(body)
            assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", {"Content_Length": 10**11}, 413),
        ("/v1/completions", {"Authorization": "Bearer other"}, 401),
        ("/v1/completions", {"Host": "elsewhere"}, 403),
        ("/nowhere", {}, 404),
        ("/health", {}, 405),
    ],
)
async def test_no_body_is_asked_for_whose_head_is_refused(
    path: str, headers: dict[str, Any], status: int
) -> None:
    async with EchoEngine(api_key="right") as echo:
        given = {"Authorization": "Bearer right"} | headers
        client = await Client.connect(echo, expecting("100-continue", path, **given))
        assert (await client.answer())[0] == status


@pytest.mark.parametrize("expected", ["secret", "100-continue, secret"])
@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 417), ("/v1/messages", 417), ("/nowhere", 404)]
)
async def test_an_unknown_expectation_is_an_error_of_the_route(
    path: str, status: int, expected: str
) -> None:
    async with EchoEngine() as echo:
        client = await Client.connect(echo, expecting(expected, path))
        got, body = await client.answer()
        assert got == status
        assert body.get("type") == ("error" if path == "/v1/messages" else None)
        assert "secret" not in str(body)
        if status == 417:
            assert body["error"]["code"] == "expectation_failed"


async def test_http_1_0_has_no_expectations() -> None:
    async with EchoEngine() as echo:
        head = expecting("secret", Content_Length=2).replace(b"HTTP/1.1", b"HTTP/1.0")
        client = await Client.connect(echo, head + b"{}")
        assert (await client.answer())[0] == 400


class Written(asyncio.Transport):
    """A transport that keeps what is written to it, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.closed = asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()


async def test_half_a_head_that_comes_at_once_with_its_connection_is_a_408() -> None:
    """Before the task that waits for heads has begun."""
    async with EchoEngine(header_timeout=SOON_S) as echo:
        server = echo.server._runner.server
        assert server is not None
        limits = ConnectionLimits(
            SOON_S, keep_alive_s=LONG_S, write_timeout_s=LONG_S, max_connections=1
        )
        connection, transport = Connections(server, limits)(), Written()
        connection.connection_made(transport)
        connection.data_received(GET[:20])
        async with asyncio.timeout(END_S):
            await transport.closed.wait()
        connection.connection_lost(None)
    assert answer_in(transport.data)[0] == 408


async def test_a_body_that_comes_before_its_handler_has_begun_is_no_head() -> None:
    async with EchoEngine() as echo:
        server = echo.server._runner.server
        assert server is not None
        limits = ConnectionLimits(
            SOON_S, keep_alive_s=LONG_S, write_timeout_s=LONG_S, max_connections=1
        )
        connection, transport = Connections(server, limits)(), Written()
        connection.connection_made(transport)
        head = GET.replace(b"GET", b"POST")[:-2] + b"Content-Length: 9\r\n\r\n"
        for data in (head, b"12345"):
            connection.data_received(data)
        assert connection._deadline is None
        connection.connection_lost(None)


async def test_single_bytes_do_not_extend_the_deadline_of_a_head() -> None:
    async with EchoEngine(header_timeout=SOON_S, keep_alive_timeout=LONG_S) as echo:
        client = await Client.connect(echo, b"GET /")
        ended = asyncio.create_task(client.rest())
        while not ended.done():
            client.writer.write(b"a")
            await asyncio.sleep(SOON_S / 4)
        assert b" 408 " in await ended


async def test_a_connection_without_requests_is_closed_after_the_keep_alive_time() -> None:
    async with EchoEngine(header_timeout=LONG_S, keep_alive_timeout=SOON_S) as echo:
        client = await Client.connect(echo, GET)
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""


async def test_neither_deadline_ends_a_request_that_runs() -> None:
    """Nor a stream, nor what waits for its engine."""
    async with EchoEngine(header_timeout=SOON_S, keep_alive_timeout=SOON_S) as echo:
        echo.scheduler.is_paused = True
        body = json.dumps(NEVER).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        client = await Client.connect(echo, head.encode() + body)
        await echo.until(lambda: bool(echo.scheduler.live))
        await asyncio.sleep(4 * SOON_S)
        echo.scheduler.is_paused = False
        echo.scheduler.resume()
        assert (await client.answer())[0] == 200


async def test_at_the_limit_a_new_connection_replaces_an_idle_one() -> None:
    async with EchoEngine(max_connections=2) as echo:
        oldest = await Client.connect(echo, GET)
        await oldest.answer()
        second = await Client.connect(echo, GET)
        await second.answer()
        third = await Client.connect(echo, GET)
        assert (await third.answer())[0] == 200
        assert await oldest.rest() == b""
        second.writer.write(GET)
        assert (await second.answer())[0] == 200


async def test_a_new_connection_is_a_503_if_none_is_idle() -> None:
    async with EchoEngine(max_connections=2) as echo:
        echo.scheduler.is_paused = True
        busy = [asyncio.create_task(echo.web.post("/v1/completions", json=NEVER)) for _ in range(2)]
        await echo.until(lambda: len(echo.scheduler.live) == 2)
        for sent in (b"", GET):
            surplus = await Client.connect(echo, sent)
            status, error = answer_in(await surplus.rest())
            assert (status, error["code"]) == (503, "too_many_connections")
            assert "2 open connections" in error["message"]
        echo.scheduler.is_paused = False
        echo.scheduler.resume()
        for task in busy:
            assert (await task).status == 200
        after = await Client.connect(echo, GET)
        assert (await after.answer())[0] == 200


SECRET = b"<script>secret</script>"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (SECRET + b"\r\n\r\n", 400, "bad_request"),
        (b"GET " + SECRET + b" HTTP/1.1\r\nHost: localhost\r\n" + SECRET + b"\r\n\r\n", 400, ""),
        (b"GET / HTTP/9." + SECRET + b"\r\n\r\n", 400, "bad_request"),
        (b"GET /" + SECRET * 1000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nA: " + SECRET * 1000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + (SECRET[1:7] + b": a\r\n") * 200 + b"\r\n", 400, "bad_request"),
        (b"\x16\x03\x01" + SECRET, 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: " + SECRET + b"\r\n\r\n", 400, ""),
    ],
)
async def test_invalid_http_gets_a_json_error_without_the_clients_bytes(
    sent: bytes, status: int, code: str
) -> None:
    async with EchoEngine() as echo:
        client = await Client.connect(echo, sent)
        data = await client.rest()
        assert b"secret" not in data
        found, error = answer_in(data)
        assert found == status
        assert error["type"] == "invalid_request_error"
        assert error["code"] == (code or error["code"])


@pytest.mark.parametrize("make_loop", [new_event_loop, asyncio.new_event_loop])
def test_a_flood_of_connections_is_accepted_in_few_iterations_of_the_loop(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    num_clients = 200
    made: list[asyncio.BaseTransport] = []

    class Made(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def num_iterations() -> int:
        servers = await open_port(Made, "127.0.0.1", 0)
        with contextlib.ExitStack() as clients:
            for server in servers:
                clients.callback(server.close)
            for _ in range(num_clients):
                client = clients.enter_context(socket.socket())
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(servers[0].sockets[0].getsockname())
            number = 0
            while len(made) < num_clients and number < 10 * num_clients:
                await asyncio.sleep(0)
                number += 1
            for transport in made:
                transport.close()
        return number

    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert runner.run(num_iterations()) < num_clients / 4
    assert len(made) == num_clients


async def test_all_connections_end_when_the_server_stops() -> None:
    async with EchoEngine() as echo:
        silent, half, idle = [await Client.connect(echo, GET[:size]) for size in (0, 20, len(GET))]
        await idle.answer()
    for client in (silent, half, idle):
        assert await client.rest() == b""
