"""`aserve health` finds the server by the server's own options, whatever it listens on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aserve.config import ServerOptions
from aserve.health import ask_health
from tests.fakes.echo_engine import EchoEngine
from tests.http.test_listening import TLS


@pytest.mark.parametrize("options", [{}, TLS], ids=["http", "https"])
async def test_a_server_on_a_port_is_ready_until_it_drains(options: dict[str, Any]) -> None:
    async with EchoEngine(**options) as echo:
        port = int(echo.url.rpartition(":")[2])
        asked = ServerOptions(host="0.0.0.0", port=port, **options)
        assert await asyncio.to_thread(ask_health, asked) == (True, "ready")
        echo.state.phase = "draining"
        assert await asyncio.to_thread(ask_health, asked) == (False, "draining")


async def test_a_server_on_a_unix_socket_is_ready_until_it_has_gone(tmp_path: Path) -> None:
    asked = ServerOptions(uds=str(tmp_path / "aserve.sock"))
    echo = EchoEngine(uds=asked.uds)
    try:
        await echo.server.start()
        assert await asyncio.to_thread(ask_health, asked) == (True, "ready")
    finally:
        await echo.server.stop()
        echo.tokenize_service.close()
    is_ready, reason = await asyncio.to_thread(ask_health, asked)
    assert not is_ready
    assert "does not answer" in reason
