"""The life of the router: it binds, probes the replicas, passes requests on, drains and closes.

With `--replicas N` it also starts and ends the processes of its replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence

from aiohttp import web

from aserve.config import Resolved
from aserve.errors import ConfigError
from aserve.host.environment import ending_signals
from aserve.host.logs import announce
from aserve.host.threads import new_event_loop
from aserve.http.connection import address_of, listen, reason_of
from aserve.http.peers import ALONE
from aserve.router.app import Router
from aserve.router.fleet import Fleet

logger = logging.getLogger(__name__)

CLOSE_S = 1.0  # for requests that are still open after the drain, and again to close connections


def route(resolved: Resolved, addresses: Sequence[str]) -> int:
    """Runs until a signal, and returns the process's exit code."""
    if not addresses and not resolved.server.admin_api_key:
        raise ConfigError(
            "give the address of at least one replica, or --admin-api-key to add them by "
            "POST /admin/replicas"
        )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(RouterServer(resolved, addresses).run())


def serve_replicas(resolved: Resolved) -> int:
    """Serves by child processes until a signal, and returns the process's exit code."""

    async def run() -> int:
        return await RouterServer(resolved, (), has_fleet=True).run()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run())


class RouterServer:
    """The port of a router. `address` is set by `start`. It starts its replicas if `has_fleet`."""

    def __init__(
        self, resolved: Resolved, addresses: Sequence[str], *, has_fleet: bool = False
    ) -> None:
        self.address = ""
        self.router = Router(resolved, addresses)
        if has_fleet:
            self.router.admin.fleet = Fleet(resolved, self.router.admin.registry())
        self._options = resolved.server
        self._model_name = resolved.model_name
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
        try:
            await self.serve()
        finally:
            await self.stop()
        fleet = self.router.admin.fleet
        return 0 if fleet is None else fleet.exit_code

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
        """Passes requests on until `end`, then lets the open ones finish, or ends them."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self.router.watch())
            announcing = group.create_task(self._announce())
            failing = group.create_task(self._end_after_failure())
            fleet = self.router.admin.fleet
            if fleet is not None:
                group.create_task(fleet.run())
            await self._ending.wait()
            failing.cancel()
            announcing.cancel()
            deadline_s = asyncio.get_running_loop().time() + self._options.drain_timeout
            self._start_draining()
            await self._until(self.router.proxy.idle, deadline_s)
            if fleet is not None:
                fleet.leave()
                await self._until(fleet.ended, deadline_s)
                await fleet.close()
            watching.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.router.proxy.end_open()
                await self.router.proxy.idle.wait()

    async def _announce(self) -> None:
        """Prints the address, with replicas of its own when all of them have loaded."""
        what, num_replicas = "router", self.router.num_given
        if self.router.admin.fleet is not None:
            what, num_replicas = self._model_name, self._options.replicas
            await self.router.admin.fleet.serving.wait()
        announce(
            f"aserve: {what} at {self.address}, {num_replicas} replicas, "
            f"policy {self.router.options.policy}"
        )

    async def _end_after_failure(self) -> None:
        """Ends the router when none of its own replicas is left."""
        if self.router.admin.fleet is not None:
            await self.router.admin.fleet.failed.wait()
            self.end()

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

    def _start_draining(self) -> None:
        self.router.is_draining = True
        if self.router.admin.fleet is not None:
            self.router.admin.fleet.stop_restarting()
        timeout_s = self._options.drain_timeout
        num_open = self.router.proxy.num_open
        logger.info("draining open_requests=%s timeout_s=%s", num_open, timeout_s)

    async def _until(self, event: asyncio.Event, deadline_s: float) -> None:
        """Waits for the event, the deadline or the second signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s), asyncio.TaskGroup() as group:
                waiting = group.create_task(event.wait())
                hurry = group.create_task(self._hurry.wait())
                waiting.add_done_callback(lambda _: hurry.cancel())
                hurry.add_done_callback(lambda _: waiting.cancel())
