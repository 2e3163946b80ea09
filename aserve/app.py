"""The one place that builds and connects objects: an engine (`App`), and a server around it.

Knows everybody, decides nothing. Clients and text are joined here; core.py builds the rest.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from aserve.actors.detokenizer import DetokenizerActor
from aserve.actors.supervisor import Failure, Phase, Supervisor
from aserve.actors.tokenizer import TokenizerActor
from aserve.banner import announce
from aserve.channel import Channel, Codec
from aserve.config import Resolved
from aserve.core import Core, CorePorts, LocalCore
from aserve.errors import BugError, ErrorInfo, ShuttingDown
from aserve.event_loop import new_event_loop
from aserve.gpu.device.process import prepare_process
from aserve.http.openai.call import SEED_BITS, random_seed
from aserve.http.server import HttpServer
from aserve.http.state import HttpContext, ServerState
from aserve.http.text_desk import TextDesk
from aserve.launch import Launcher, Stopped, Waits, launcher_of
from aserve.load import Loaded, vocabulary_of
from aserve.messages import (
    Cancel,
    DetokenizerEvent,
    GenerateRequest,
    OutputChunk,
    TokenizerEvent,
)
from aserve.observability.metrics import Metrics
from aserve.observability.trace import Trace
from aserve.outlet import Gateway
from aserve.text.load import TextSide
from aserve.text.prompt import PromptEncoder, PromptLimits

logger = logging.getLogger(__name__)


class App:
    """An engine: from a GenerateRequest in the gateway to its OutputChunks in an outlet.

    `state` says whether it takes requests. `ports` are for the half that is the engine proper. With
    `codec` each message passes msgpack on its way.
    """

    def __init__(
        self,
        resolved: Resolved,
        *,
        codec: bool = False,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        prepare_process(resolved.machine.threads)
        self.resolved = resolved
        self.state = ServerState()
        self.metrics = Metrics()
        self.gateway = Gateway(submit=self._submit, cancel=self._cancel)
        self.desk = TextDesk()
        self._codec = codec
        self._on_death = on_death
        self._trace = Trace()
        self._text: Channel[DetokenizerEvent] = Channel(codec=self._codec_of(DetokenizerEvent))
        self.ports = CorePorts(self._text, self.metrics.heard, self._trace)
        self._running: _Running | None = None
        self._is_closed = False

    @property
    def failure(self) -> Failure | None:
        return self._running.supervisor.failure if self._running else None

    async def start(self, loaded: Loaded) -> None:
        """Around an engine in this process."""
        executor, text = loaded.executor, loaded.text
        vocabulary = functools.partial(vocabulary_of, text.tokenizer, executor.spec.vocab_size)
        core = LocalCore(
            executor, self.resolved, ports=self.ports, vocabulary=vocabulary, codec=self._codec
        )
        await self.join(core, text)

    async def join(self, core: Core, text: TextSide) -> None:
        """Ready when this returns: the engine runs, one step went through it, actors listen."""
        supervisor = self._connect(core, text)
        await core.start(supervisor.report_death)
        supervisor.start()
        self.state.max_model_len = core.spec.max_model_len
        self.state.engine_age_s = core.age_s
        self.state.defaults = text.defaults
        self._report("ready", "")

    async def drain(self, grace_s: float) -> None:
        if self._running is not None:
            await self._running.supervisor.drain(grace_s)

    async def close(self) -> None:
        """Ends what is still open; afterwards no task and no thread is left."""
        running = self._running
        if running is None or self._is_closed:
            return
        self._is_closed = True
        await running.supervisor.drain(0)
        await running.supervisor.stop()
        self.desk.close()
        await running.core.close()

    def end_all(self, error: ErrorInfo) -> None:
        self.gateway.end_all(error)
        self.metrics.all_ended(error.code)

    async def drained(self) -> None:
        await self.gateway.drained()

    def _submit(self, request: GenerateRequest) -> None:
        """Whoever opens a request asks `state.refusal()` first."""
        if self._running is None:
            raise BugError(f"request {request.request_id} was sent to an engine that is not there")
        self.metrics.received(request)
        self._running.inbox.send(request)

    def _cancel(self, cancel: Cancel) -> None:
        if self._running is not None:
            self._running.inbox.send(cancel)

    def _deliver(self, chunk: OutputChunk) -> None:
        self.metrics.delivered(chunk)
        self._trace.delivered(chunk)
        self.gateway.deliver(chunk)

    def _report(self, phase: Phase, reason: str) -> None:
        self.state.phase = phase
        self.state.reason = reason
        if phase == "dead":
            self._on_death()

    def _connect(self, core: Core, text: TextSide) -> Supervisor:
        detokenizer = DetokenizerActor(
            text.tokenizer, deliver=self._deliver, engine=core.inbox, inbox=self._text
        )
        spec = core.spec
        limits = PromptLimits(spec.max_model_len, spec.vocab_size, text.defaults.max_new_tokens)
        encoder = PromptEncoder(text.tokenizer, template=text.template, limits=limits)
        self.desk.open(encoder)
        tokenizer = TokenizerActor(
            encoder,
            detokenizer=detokenizer.inbox,
            engine=core.inbox,
            codec=self._codec_of(TokenizerEvent),
        )
        actors = (detokenizer, *core.actors, tokenizer)
        self.metrics.watch_inboxes({actor.name: actor.backlog for actor in actors})
        supervisor = Supervisor(actors, requests=self, report=self._report)
        self._running = _Running(core, tokenizer.inbox, supervisor)
        return supervisor

    def _codec_of(self, kind: object) -> Codec | None:
        return Codec(kind) if self._codec else None


@dataclass(frozen=True, slots=True)
class _Running:
    core: Core
    inbox: Channel[TokenizerEvent]
    supervisor: Supervisor


def seed_source(seed: int | None) -> Callable[[], int]:
    """Where requests without a seed get theirs."""
    if seed is None:
        return random_seed
    numbers = random.Random(seed)
    return lambda: numbers.getrandbits(SEED_BITS)


def serve(resolved: Resolved) -> int:
    """Serves until a signal or a death; the process's exit code."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(Serving(resolved, launcher_of(resolved)).run())


def connect_http(app: App) -> HttpServer:
    """The server before an engine, which may still be loading."""
    resolved = app.resolved
    return HttpServer(
        HttpContext(
            gateway=app.gateway,
            state=app.state,
            options=resolved.server,
            model_names=(resolved.model_name,),
            created=int(time.time()),
            registry=app.metrics.registry,
            desk=app.desk,
            draw_seed=seed_source(resolved.debug.seed),
        )
    )


class Serving:
    """One life of the server: bind, load, serve, drain, close. `address` is known once bound."""

    def __init__(self, resolved: Resolved, launcher: Launcher) -> None:
        self.address = ""
        self._resolved = resolved
        self._launcher = launcher
        self._ending = asyncio.Event()  # set by a signal, or by a death
        self._waits = Waits()
        self._app = App(resolved, on_death=self._ending.set)
        self._http = connect_http(self._app)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        self.address = await self._http.start()
        try:
            await self._serve()
        finally:
            await self._http.stop()
            await self._app.close()
        return 1 if self._app.failure else 0

    async def _serve(self) -> None:
        logger.info("loading model=%s address=%s", self._resolved.model_source, self.address)
        try:
            launched = await self._launcher.launch(self._app, self._waits)
        except Stopped:
            return
        gc.collect()
        gc.freeze()  # PERF: what lives as long as the process is looked at by no later collection
        announce(self._resolved, launched, self.address)
        await self._ending.wait()
        await self._app.drain(self._resolved.server.drain_timeout)

    def _signalled(self) -> None:
        """The second signal doesn't wait for open streams."""
        if self._ending.is_set():
            self._app.end_all(ShuttingDown("the server was stopped").info())
        self._ending.set()
        self._waits.end()
