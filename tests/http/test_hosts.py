"""The names that a server answers to, and the pages that may open a websocket to it."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import WSServerHandshakeError

from aserve.config import ServerOptions
from aserve.http.hosts import AllowedHosts
from tests.fakes.echo_engine import EchoEngine


async def status(echo: EchoEngine, host: str, path: str = "/health") -> int:
    async with (
        aiohttp.ClientSession(echo.url) as web,
        web.get(path, headers={"Host": host}) as answer,
    ):
        if answer.status == 403:
            assert "--allowed-hosts" in (await answer.json())["error"]["message"]
        return answer.status


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:80", 200),
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("app.localhost:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("169.254.169.254", 403),
        ("[", 403),
        ("", 403),
        ("localhost@evil.example", 403),
    ],
)
async def test_a_server_on_a_loopback_address_accepts_only_local_hosts(
    echo: EchoEngine, host: str, expected: int
) -> None:
    for path in ("/health", "/", "/v1/models", "/nothing"):
        found = await status(echo, host, path)
        assert (found == 403) == (expected == 403), path


async def test_names_can_be_allowed() -> None:
    async with EchoEngine(allowed_hosts="Chat.example, 10.0.0.1") as echo:
        assert await status(echo, "chat.example:443") == 200
        assert await status(echo, "10.0.0.1") == 200
        assert await status(echo, "localhost") == 200
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
    async with aiohttp.ClientSession(echo.url) as web:
        try:
            async with web.ws_connect("/v1/responses", headers={"Origin": origin}):
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
