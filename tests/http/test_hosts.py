"""The names that a server answers to, and the pages that may open a websocket to it."""

from __future__ import annotations

import pytest
from aiohttp import WSServerHandshakeError

from aserve.config import ServerOptions
from aserve.http.hosts import AllowedHosts
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask


async def status(echo: EchoEngine, host: str, path: str = "/health") -> int:
    answer = await ask(echo, path, headers={"Host": host})
    if answer.status == 403:
        assert "--allowed-hosts" in answer.error["message"]
    return answer.status


LOCAL = ("127.0.0.1:80", "localhost", "LocalHost:8000", "app.localhost:8000", "[::1]:8000")
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "169.254.169.254",
    "[",
    "",
    "localhost@evil.example",
)


async def test_a_server_on_a_loopback_address_accepts_only_local_hosts(echo: EchoEngine) -> None:
    for host in (*LOCAL, *FOREIGN):
        for path in ("/health", "/", "/v1/models", "/nothing"):
            assert (await status(echo, host, path) == 403) is (host in FOREIGN), (host, path)


async def test_names_can_be_allowed() -> None:
    async with EchoEngine(allowed_hosts="Chat.example, 10.0.0.1") as echo:
        for host in ("chat.example:443", "10.0.0.1", "localhost"):
            assert await status(echo, host) == 200
        assert await status(echo, "example") == 403
    async with EchoEngine(allowed_hosts="*") as echo:
        assert await status(echo, "evil.example") == 200


@pytest.mark.parametrize("listens", ["0.0.0.0", "::", "10.1.2.3", "gpu-7"])
def test_a_public_server_accepts_any_host_unless_hosts_are_given(listens: str) -> None:
    assert AllowedHosts(ServerOptions(host=listens)).names is None
    given = AllowedHosts(ServerOptions(host=listens, allowed_hosts="gpu-7"))
    assert given.names is not None
    assert "gpu-7" in given.names


@pytest.mark.parametrize("listens", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_a_loopback_address_is_an_allowed_host(listens: str) -> None:
    names = AllowedHosts(ServerOptions(host=listens)).names
    assert names is not None
    assert listens in names


async def connect_status(echo: EchoEngine, origin: str) -> int:
    try:
        async with echo.web.ws_connect("/v1/responses", headers={"Origin": origin}):
            return 101
    except WSServerHandshakeError as error:
        return error.status


@pytest.mark.parametrize(
    ("origin", "allowed", "expected"),
    [
        ("http://[", None, 403),
        ("null", None, 403),
        ("", None, 403),
        ("https://evil.example", None, 403),
        ("SELF", None, 101),
        ("https://chat.example", "https://chat.example,https://b.example", 101),
        ("HTTPS://CHAT.example", "https://Chat.example", 101),
        ("https://evil.example", "https://chat.example", 403),
        ("http://chat.example", "https://chat.example", 403),
        ("SELF", "https://chat.example", 101),
        ("https://evil.example", "*", 101),
    ],
)
async def test_a_websocket_opens_for_the_servers_own_pages_and_allowed_ones(
    origin: str, allowed: str | None, expected: int
) -> None:
    async with EchoEngine(allowed_origins=allowed) as echo:
        assert await connect_status(echo, origin.replace("SELF", echo.url)) == expected
