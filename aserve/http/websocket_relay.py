"""Passes the messages of two websockets on: the client's, and that of the process behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeAlias

import aiohttp
from aiohttp import web

Screen: TypeAlias = Callable[[str], str | None]

# Close codes that no frame may have (RFC 6455, 7.4.1), and those that are sent in their place.
SENT_CODES = {1005: aiohttp.WSCloseCode.OK, 1006: aiohttp.WSCloseCode.INTERNAL_ERROR}
SENT_CODES[1015] = SENT_CODES[1006]


def client_socket(*, heartbeat_s: float, max_size: int) -> web.WebSocketResponse:
    """Returns the client's side of a relay.

    WHY no autoclose: it would end the connection, and with it the handler, before the code with
    which the client closes has reached the other side.
    """
    return web.WebSocketResponse(
        heartbeat=heartbeat_s, max_msg_size=max_size, compress=False, autoclose=False
    )


def accept(_: str) -> str | None:
    """A screen that lets every text pass."""
    return None


async def pump_both(
    client: web.WebSocketResponse,
    upstream: aiohttp.ClientWebSocketResponse,
    *,
    asked: Screen = accept,
    answered: Screen = accept,
) -> None:
    """Passes messages on in both directions until one side closes. `asked` and `answered` see each
    text of the client and of the other side. A text that one of them returns goes back instead.
    """
    async with asyncio.TaskGroup() as group:
        up = group.create_task(_pump(client, upstream, asked))
        down = group.create_task(_pump(upstream, client, answered))
        up.add_done_callback(lambda _: down.cancel())
        down.add_done_callback(lambda _: up.cancel())


async def _pump(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    sink: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    screen: Screen,
) -> None:
    with contextlib.suppress(ConnectionError):
        message = await source.receive()
        while message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            if message.type is aiohttp.WSMsgType.BINARY:
                await sink.send_bytes(message.data)
            elif (refusal := screen(message.data)) is not None:
                await source.send_str(refusal)
            else:
                await sink.send_str(message.data)
            message = await source.receive()
        code = source.close_code or aiohttp.WSCloseCode.OK
        reason = message.extra if message.type is aiohttp.WSMsgType.CLOSE else None
        await sink.close(code=SENT_CODES.get(code, code), message=(reason or "").encode())
