"""A server in the test's own process, and a client of it with the administrator's key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession

from aserve.config import Resolved
from aserve.load import load
from aserve.server import connect_http
from tests.fakes.packed_channel import PackedFrontend

ADMIN_KEY = "root"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@asynccontextmanager
async def served(resolved: Resolved) -> AsyncIterator[ClientSession]:
    frontend = PackedFrontend(resolved)
    server = connect_http(frontend)
    address = await server.start()
    try:
        await frontend.start(await asyncio.to_thread(load, resolved))
        async with ClientSession(address, headers=ADMIN) as session:
            yield session
    finally:
        await server.stop()
        await frontend.close()
