"""Websockets through the router: which replica they go to, how they end, and who learns what."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import (
    ClientSession,
    ClientWebSocketResponse,
    WSMsgType,
    WSServerHandshakeError,
    web,
)

from aserve.router.run import RouterServer
from tests.router.routed import ADMIN, OK, StandIn, routed, written

PATH = "/v1/realtime"
HEARTBEAT_S = 0.4
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"


class Echo:
    """A replica that answers each message of its websockets. It closes them, dies, says nothing
    any more, or tells a header of their request if it is told. `has_ended`: one was closed, with
    `close_code`.
    """

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()
        self.close_code: int | None = None

    async def start(self) -> str:
        """Returns host and port."""
        app = web.Application()
        app.router.add_get(PATH, self._serve)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        host, port = self.runner.addresses[0]
        return f"{host}:{port}"

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.data == "close":
                await socket.close(code=4001, message=b"because")
            elif message.data == "die":
                assert request.transport is not None
                request.transport.abort()
            elif message.data == "hang":
                await asyncio.Event().wait()
            elif message.data in ("Authorization", "Origin"):
                await socket.send_str(request.headers.get(message.data, "none"))
            elif message.type is WSMsgType.TEXT:
                await socket.send_str(message.data.upper())
            else:
                await socket.send_bytes(message.data[::-1])
        self.close_code = socket.close_code
        self.has_ended.set()
        return socket


def all_healthy(server: RouterServer) -> None:
    for replica in server.router.balancer.replicas():
        server.router.balancer.probed(replica.name, load=None)


@asynccontextmanager
async def routed_socket(
    echo: Echo, *, login: str = "", answers_pings: bool = True
) -> AsyncIterator[tuple[ClientWebSocketResponse, RouterServer]]:
    """Yields a client's websocket to the echo behind the router, and that."""
    address = await echo.start()
    async with routed() as (client, server):
        server.router.proxy.heartbeat_s = HEARTBEAT_S
        server.router.add(f"http://{login}{address}")
        all_healthy(server)
        async with client.ws_connect(f"{PATH}?model=m", autoping=answers_pings) as socket:
            yield socket, server
    await echo.runner.cleanup()


async def test_websockets_pass_in_both_directions() -> None:
    async with routed_socket(Echo()) as (socket, _):
        await socket.send_str("abc")
        assert await socket.receive_str() == "ABC"
        await socket.send_bytes(b"\x00\xff")
        assert await socket.receive_bytes() == b"\xff\x00"


async def test_the_end_of_the_router_closes_websockets_as_going_away() -> None:
    async with routed_socket(Echo()) as (socket, server):
        await socket.send_str("abc")
        assert await socket.receive_str() == "ABC"
        server.end()
        server.end()
        message = await socket.receive(timeout=5)
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1001)


@pytest.mark.parametrize(("order", "end"), [("close", (4001, "because")), ("die", (1011, ""))])
async def test_the_end_of_a_websocket_passes_with_its_reason_and_a_code_that_may_be_sent(
    order: str, end: tuple[int, str]
) -> None:
    async with routed_socket(Echo()) as (socket, _):
        await socket.send_str(order)
        message = await socket.receive()
        assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, *end)


async def test_the_code_with_which_a_client_closes_its_websocket_reaches_the_replica() -> None:
    echo = Echo()
    async with routed_socket(echo) as (socket, _), asyncio.timeout(5):
        await socket.close(code=4002, message=b"enough")
        await echo.has_ended.wait()
    assert echo.close_code == 4002


async def test_a_websocket_whose_client_answers_no_ping_is_closed() -> None:
    """Such as one that has lost its network: nothing else ends its connection."""
    echo = Echo()
    async with routed_socket(echo, answers_pings=False) as (_, server), asyncio.timeout(10):
        await echo.has_ended.wait()
        await server.router.proxy.idle.wait()


async def test_a_websocket_whose_replica_answers_no_ping_is_closed() -> None:
    async with routed_socket(Echo()) as (socket, _):
        await socket.send_str("hang")
        message = await socket.receive(timeout=10)
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1011)


async def test_a_websocket_goes_to_another_replica_if_one_cannot_open_it() -> None:
    ended, busy = StandIn(written(closes=True)), StandIn(written(BUSY))
    async with routed_socket(Echo()) as (_, server):
        for stand_in in (ended, busy):
            await stand_in.start()
            server.router.add(stand_in.url)
        async with ClientSession(server.address) as client:
            for _ in range(3):
                all_healthy(server)
                async with client.ws_connect(PATH) as socket:
                    await socket.send_str("abc")
                    assert await socket.receive_str() == "ABC"
        for stand_in in (ended, busy):
            assert stand_in.asked
            stand_in.server.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (OK, 502),
        (b"HTTP/1.1 101 Other\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", 502),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", 401),
        (BUSY, 503),
        (b"not http at all\r\n\r\n", 502),
    ],
    ids=("200", "another protocol", "401", "503", "no http"),
)
async def test_a_websocket_that_no_replica_opens_is_answered_by_an_error(
    head: bytes, status: int
) -> None:
    async with routed(StandIn(written(head, closes=True))) as (client, server):
        with pytest.raises(WSServerHandshakeError) as refused:
            await client.ws_connect(PATH)
        assert refused.value.status == status
        assert refused.value.headers is not None
        assert refused.value.headers.get("Retry-After") == ("7" if head == BUSY else None)
        assert server.router.proxy.num_open == 0


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_of_a_websocket_is_not_followed(status: int) -> None:
    """A replica could send the router, and its key, to any address."""
    other = StandIn()
    await other.start()
    redirect = f"HTTP/1.1 {status} No\r\nLocation: {other.url}{PATH}\r\nContent-Length: 0\r\n\r\n"
    async with routed(StandIn(written(redirect.encode()))) as (client, _):
        with pytest.raises(WSServerHandshakeError) as refused:
            await client.ws_connect(PATH)
    other.server.close()
    assert refused.value.status == 502
    assert other.asked == []


@pytest.mark.parametrize("limit", ["requests", "tokens"])
async def test_the_requests_in_a_websocket_count_as_others_do(limit: str) -> None:
    """A client could ask for as much as it liked by websocket."""
    create = '{"type":"response.create","stream_id":"s","input":"abc","max_output_tokens":90}'
    echo = Echo()
    address = await echo.start()
    async with routed(**{f"{limit}_per_minute": 1 if limit == "requests" else 100}) as (
        client,
        server,
    ):
        server.router.add(f"http://{address}")
        all_healthy(server)
        async with client.ws_connect(PATH) as socket:
            for other in ('{"type":"response.amend"}', "[", '{"type":[]}'):
                await socket.send_str(other)
                assert await socket.receive_str() == other.upper()
            await socket.send_str(create)
            assert await socket.receive_str() == create.upper()
            await socket.send_str(create)
            event = await socket.receive_json()
            assert (event["type"], event["status"], event["stream_id"]) == ("error", 429, "s")
            assert event["error"]["code"] == "rate_limit_exceeded"
    await echo.runner.cleanup()


@pytest.mark.parametrize("page", ["own", "http://elsewhere:80"])
async def test_a_page_of_the_router_is_a_page_of_its_replicas(page: str) -> None:
    """A replica lets its own pages open websockets, and its Host is not that of the router."""
    async with routed_socket(Echo()) as (_, server), ClientSession(server.address) as client:
        origin = server.address if page == "own" else page
        async with client.ws_connect(PATH, headers={"Origin": origin}) as socket:
            await socket.send_str("Origin")
            assert await socket.receive_str() == ("none" if page == "own" else page)


async def test_the_login_of_a_replica_is_sent_to_it_and_shown_to_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with routed_socket(Echo(), login="user:p%40ss@") as (socket, server):
        await socket.send_str("Authorization")
        assert await socket.receive_str() == f"Basic {b64encode(b'user:p@ss').decode()}"
        async with ClientSession(server.address, headers=ADMIN) as client:
            shown = ""
            for path in ("/server_info", "/metrics", "/admin/replicas"):
                async with client.get(path) as got:
                    shown += await got.text()
            name = server.router.balancer.replicas()[0].name
            assert shown.count(name) > 3
            assert "p%40ss" not in shown
            url = name.replace("//", "//user:p%40ss@")
            async with client.post("/admin/replicas/drain", json={"url": url}) as got:
                assert (await got.json())["data"][0]["state"] == "draining"
            for added in (name.replace("//", "//user:new@"), name):
                async with client.post("/admin/replicas", json={"url": added}) as got:
                    assert len((await got.json())["data"]) == 1
            async with ClientSession(server.address) as other, other.ws_connect(PATH) as again:
                await again.send_str("Authorization")
                assert await again.receive_str() == f"Basic {b64encode(b'user:new').decode()}"
    assert "p%40ss" not in caplog.text
