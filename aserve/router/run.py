"""The life of the router: it binds, probes the replicas, passes requests on, drains and closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence

from aiohttp import web
from rich.console import Console

from aserve.config import Resolved
from aserve.errors import ConfigError
from aserve.host.environment import ending_signals
from aserve.host.threads import new_event_loop
from aserve.http.connection import address_of, listen, reason_of
from aserve.http.peers import ALONE
from aserve.router.app import Router

logger = logging.getLogger(__name__)

CLOSE_S = 1.0  # for requests that are still open after the drain


def route(resolved: Resolved, addresses: Sequence[str]) -> int:
    """Runs until a signal, and returns the process's exit code."""
    if not addresses and not resolved.server.admin_api_key:
        raise ConfigError(
            "give the address of at least one replica, or --admin-api-key to add them by "
            "POST /admin/replicas"
        )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(RouterServer(resolved, addresses).run())


class RouterServer:
    """The port of a router. `address` is set by `start`."""

    def __init__(self, resolved: Resolved, addresses: Sequence[str]) -> None:
        self.address = ""
        self.router = Router(resolved, addresses)
        self._options = resolved.server
        self._runner = web.AppRunner(
            self.router.app(), access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S
        )
        self._listeners: list[asyncio.Server] = []
        self._ending = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self.end)
        await self.start()
        Console(soft_wrap=True).print(
            f"aserve: router at {self.address}, {self.router.num_given} replicas, "
            f"policy {self.router.options.policy}",
            highlight=False,
            markup=False,
        )
        try:
            await self.serve()
        finally:
            await self.stop()
        return 0

    async def start(self) -> None:
        self.router.open()
        await self._runner.setup()
        try:
            self._listeners = await listen(self._runner, self._options, ALONE)
        except OSError as error:
            await self.stop()
            where = self._options.uds or f"{self._options.host}:{self._options.port}"
            raise ConfigError(f"cannot listen on {where}: {reason_of(error)}") from error
        self.address = address_of(self._listeners[0], self._options)

    async def serve(self) -> None:
        """Passes requests on until `end`, then lets the open ones finish."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self.router.watch())
            await self._ending.wait()
            await self._drain()
            watching.cancel()

    def end(self) -> None:
        """Starts to drain at the first call; the second one ends the open requests."""
        if self._ending.is_set():
            self._hurry.set()
        self._ending.set()

    async def stop(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._listeners and self._options.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._options.uds)
        await self._runner.cleanup()
        await self.router.close()

    async def _drain(self) -> None:
        self.router.is_draining = True
        timeout_s = self._options.drain_timeout
        num_open = self.router.proxy.num_open
        logger.info("draining open_requests=%s timeout_s=%s", num_open, timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                idle = group.create_task(self.router.proxy.idle.wait())
                hurry = group.create_task(self._hurry.wait())
                idle.add_done_callback(lambda _: hurry.cancel())
                hurry.add_done_callback(lambda _: idle.cancel())
