"""The life of the server: it binds, loads, serves, drains and closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

from aserve.config import Resolved, shown_settings
from aserve.errors import ShuttingDown
from aserve.frontend import Frontend
from aserve.host.environment import ending_signals
from aserve.host.logs import announce
from aserve.host.memory import set_up_collector
from aserve.host.threads import in_thread, new_event_loop
from aserve.http.openai.call import seed_source
from aserve.http.peers import ALONE, Peers
from aserve.http.server import HttpServer
from aserve.http.state import HttpContext
from aserve.load import find_model
from aserve.observability.compat_metrics import with_compat
from aserve.observability.tracing import Tracing, open_tracing
from aserve.processes.frontends import Frontends
from aserve.receipts.facts import FactFinder
from aserve.startup import Launched, Launcher, Stopped, Waits, launcher_of

READY = b"\1"  # what a replica sends to its router

LAST_SPANS_S = 2.0  # in which a collector must take the spans of the last requests

logger = logging.getLogger(__name__)


def serve(resolved: Resolved, *, peers: Peers = ALONE, parent: socket.socket | None = None) -> int:
    """Serves until a signal, a failure or the end of `parent`, and returns the process's exit code.
    `parent` is the socket to the router of which this server is a replica: it gets one byte when
    the server is ready, and sends one to let it drain. `peers` has the token by which requests of
    that router are known.
    """
    frontends = Frontends(resolved) if resolved.server.frontends > 1 else None
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            launcher = launcher_of(resolved, frontends)
            shared = peers if frontends is None else frontends.peers
            return runner.run(Server(resolved, launcher, frontends, shared, parent).run())
    finally:
        if frontends is not None:
            frontends.remove_sockets()


class Server:
    """Runs the HTTP server and the engine. `address` is set once the port is bound. `frontends`
    are the further frontend processes, if there are any. `parent` is described at `serve`.
    """

    def __init__(
        self,
        resolved: Resolved,
        launcher: Launcher,
        frontends: Frontends | None = None,
        peers: Peers = ALONE,
        parent: socket.socket | None = None,
    ) -> None:
        self.address = ""
        self._resolved = resolved
        self._launcher = launcher
        self._ending = asyncio.Event()  # set by a signal, or by the death of an actor
        self._waits = Waits()
        self._frontend = Frontend(resolved, on_death=self._engine_died)
        self._tracing = connect_tracing(self._frontend)
        self._frontends = frontends
        self._parent = parent
        self._http = connect_http(self._frontend, peers)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self._signalled)
        if self._parent is not None:
            self._parent.setblocking(False)
            loop.add_reader(self._parent, self._told_by_parent)
        self.address = await self._http.start()
        try:
            await self._serve()
        finally:
            if self._frontends is not None:
                await self._frontends.close()
            await self._http.stop()
            await self._frontend.close()
            await end_tracing(self._tracing)
        return 1 if self._frontend.failure else 0

    async def _serve(self) -> None:
        logger.info("loading model=%s address=%s", self._resolved.model_source, self.address)
        try:
            launched = await self._launcher.launch(self._frontend, self._waits)
            if self._frontends is not None:
                self._frontend.state.share = self._frontends.share
                for serving in await self._frontends.open(self._frontend, self.address):
                    await self._waits.until(serving)
        except Stopped:
            return
        set_up_collector()
        announce_ready(self._resolved, launched, self.address)
        if self._parent is not None:
            await asyncio.get_running_loop().sock_sendall(self._parent, READY)
        await self._ending.wait()
        timeout_s = self._resolved.server.drain_timeout
        num_open = self._frontend.gateway.num_open
        logger.info("draining open_requests=%s timeout_s=%s", num_open, timeout_s)
        drains = [self._frontend.drain(timeout_s)]
        if self._frontends is not None:
            drains.append(self._frontends.drain(timeout_s, self._frontend.failure))
        await asyncio.gather(*drains)

    def _engine_died(self) -> None:
        """Starts to drain, or ends what the other frontends still wait for in their drain."""
        if self._ending.is_set() and self._frontends is not None:
            self._frontends.stop()
        self._ending.set()

    def _told_by_parent(self) -> None:
        """A byte of the router is a signal, and so is the end of its side: the second one, or the
        first one if the router has died.
        """
        assert self._parent is not None
        said = b""
        with contextlib.suppress(ConnectionError):
            said = self._parent.recv(1)
        if not said:
            asyncio.get_running_loop().remove_reader(self._parent)
        self._signalled()

    def _signalled(self) -> None:
        """Starts to drain at the first signal. The second one ends open requests at once."""
        if self._ending.is_set():
            self._frontend.end_all(ShuttingDown("the server was stopped").info())
            if self._frontends is not None:
                self._frontends.stop()
        self._ending.set()
        self._waits.end()


def connect_http(frontend: Frontend, peers: Peers = ALONE) -> HttpServer:
    """Builds the HTTP server in front of an engine that may still be loading."""
    resolved = frontend.resolved
    registry = with_compat(
        frontend.metrics.registry, resolved.server.metrics_compat, model_name=resolved.model_name
    )
    return HttpServer(
        HttpContext(
            gateway=frontend.gateway,
            state=frontend.state,
            options=resolved.server,
            model_names=resolved.model_names,
            created=int(time.time()),
            registry=registry,
            recent=frontend.metrics.recent,
            latency=frontend.metrics.latency,
            tokenize_service=frontend.tokenize_service,
            loras=frontend.loras,
            settings=shown_settings(resolved),
            receipts=FactFinder(lambda: find_model(resolved), shown_settings(resolved)),
            draw_seed=seed_source(resolved.debug.seed),
            peers=peers,
        )
    )


def connect_tracing(frontend: Frontend) -> Tracing | None:
    """Lets a span be made of each request, if the option asks for it."""
    endpoint = frontend.resolved.server.otlp_traces_endpoint
    if endpoint is None:
        return None
    tracing = open_tracing(endpoint, model_name=frontend.resolved.model_name)
    frontend.metrics.latency.on_end = tracing.record
    return tracing


async def end_tracing(tracing: Tracing | None) -> None:
    """Sends the last spans, or drops them after LAST_SPANS_S."""
    if tracing is None:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_SPANS_S):
            await in_thread(tracing.close, name="spans")


def announce_ready(resolved: Resolved, launched: Launched, address: str) -> None:
    spec, options = launched.spec, resolved.scheduler
    pages = spec.total_pages
    announce(
        f"aserve: {resolved.model_name} at {address}, {launched.about}, "
        f"context {spec.max_model_len} tokens"
    )
    announce(
        f"aserve: KV {pages} pages of {spec.page_size} = {pages * spec.page_size} tokens; "
        f"{spec.max_rows} rows, queue {options.max_queue}, overlap depth {spec.depth}, "
        f"overlap lead {spec.lead}"
    )
