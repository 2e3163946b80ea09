"""The one place that builds and connects objects: an engine (`App`), and a server around it.

Knows everybody, decides nothing. torch is imported when a model is loaded, so that the port is open
and /health answers before.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console

from aserve.actors.detokenizer import DetokenizerActor
from aserve.actors.masks import MaskActor
from aserve.actors.pump import Pump
from aserve.actors.scheduler import SchedulerActor, SchedulerPorts, SchedulerWatch
from aserve.actors.supervisor import Failure, Phase, Supervisor
from aserve.actors.tokenizer import GrammarPorts, TokenizerActor
from aserve.channel import Channel, Codec
from aserve.config import Resolved
from aserve.errors import AserveError, BugError, EngineDead, ErrorInfo, ShuttingDown
from aserve.gpu.device.process import prepare_process
from aserve.gpu.worker import Worker
from aserve.grammar.frames import Vocabulary
from aserve.grammar.library import GrammarLibrary
from aserve.grammar.matching import constrain
from aserve.grammar.workers import CompileLimits
from aserve.http.openai.call import SEED_BITS, random_seed
from aserve.http.server import HttpServer
from aserve.http.state import HttpContext, ServerState
from aserve.http.text_desk import TextDesk
from aserve.messages import (
    Cancel,
    DetokenizerEvent,
    Executor,
    GenerateRequest,
    OutputChunk,
    SchedulerEvent,
    TokenizerEvent,
)
from aserve.observability.grammars import GrammarMetrics
from aserve.observability.metrics import Metrics
from aserve.observability.recording import Recorder
from aserve.observability.step_log import StepLog
from aserve.observability.trace import Trace
from aserve.outlet import Gateway
from aserve.progress import shown_progress
from aserve.scheduling.state import SchedulerState
from aserve.text.defaults import NEUTRAL, GenerationDefaults
from aserve.text.load import load_text
from aserve.text.prompt import PromptEncoder, PromptLimits
from aserve.text.template import ChatTemplate
from aserve.text.tokenizer import TextTokenizer

T = TypeVar("T")

CLOSE_S = 0.5  # what the device may take for its current step when all is over

logger = logging.getLogger(__name__)


class LocalExecutor(Executor, Protocol):
    """An executor with threads of its own."""

    died: asyncio.Future[BaseException]  # completes if its thread ends without `close`

    def start(self, loop: asyncio.AbstractEventLoop) -> None: ...

    async def warm_up(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """What takes time to load; `about` says in a few words what was chosen for this machine."""

    executor: LocalExecutor
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    about: str
    defaults: GenerationDefaults = NEUTRAL


class App:
    """An engine: from a GenerateRequest in the gateway to its OutputChunks in an outlet.

    `state` says whether it takes requests. With `codec` each message passes msgpack on its way.
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
        self.trace = Trace()
        self.metrics = Metrics()
        self.gateway = Gateway(submit=self._submit, cancel=self._cancel)
        self.desk = TextDesk()
        self._codec = codec
        self._on_death = on_death
        self._engine: _Engine | None = None
        self._is_closed = False

    @property
    def failure(self) -> Failure | None:
        return self._engine.supervisor.failure if self._engine else None

    async def start(self, loaded: Loaded) -> None:
        """Ready when this returns: the executor runs, one step went through it, actors listen."""
        engine = self._engine = self._connect(loaded)
        executor = loaded.executor
        executor.start(asyncio.get_running_loop())
        executor.died.add_done_callback(engine.supervisor.executor_died)
        await _warmed_up(executor)
        engine.supervisor.start()
        self.state.max_model_len = executor.spec.max_model_len
        self.state.defaults = loaded.defaults
        self._report("ready", "")

    async def drain(self, grace_s: float) -> None:
        if self._engine is not None:
            await self._engine.supervisor.drain(grace_s)

    async def close(self) -> None:
        """Ends what is still open; afterwards no task and no thread is left."""
        engine = self._engine
        if engine is None or self._is_closed:
            return
        self._is_closed = True
        await engine.supervisor.drain(0)
        await engine.supervisor.stop()
        self.desk.close()
        await in_thread(engine.grammars.close, name="close")
        await self._close_executor(engine.executor)
        if engine.recorder is not None:
            engine.recorder.close()

    async def _close_executor(self, executor: LocalExecutor) -> None:
        """Not for ever: a step may be a long one, and its thread doesn't keep the process."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await in_thread(executor.close, name="close")
        except TimeoutError:
            logger.warning("the device still runs a step: its thread is left behind")

    def end_all(self, error: ErrorInfo) -> None:
        self.gateway.end_all(error)
        self.metrics.all_ended(error.code)

    async def drained(self) -> None:
        await self.gateway.drained()

    def _submit(self, request: GenerateRequest) -> None:
        """Whoever opens a request asks `state.refusal()` first."""
        if self._engine is None:
            raise BugError(f"request {request.request_id} was sent to an engine that is not there")
        self.metrics.received(request)
        self._engine.inbox.send(request)

    def _cancel(self, cancel: Cancel) -> None:
        if self._engine is not None:
            self._engine.inbox.send(cancel)

    def _deliver(self, chunk: OutputChunk) -> None:
        self.metrics.delivered(chunk)
        self.trace.delivered(chunk)
        self.gateway.deliver(chunk)

    def _report(self, phase: Phase, reason: str) -> None:
        self.state.phase = phase
        self.state.reason = reason
        if phase == "dead":
            self._on_death()

    def _connect(self, loaded: Loaded) -> _Engine:
        debug = self.resolved.debug
        spec = loaded.executor.spec
        recorder = Recorder(Path(debug.record), spec=spec) if debug.record else None
        events: Channel[SchedulerEvent] = Channel(codec=self._codec_of(SchedulerEvent))
        detokenizer = DetokenizerActor(
            loaded.tokenizer,
            deliver=self._deliver,
            scheduler=events,
            codec=self._codec_of(DetokenizerEvent),
        )
        pump = Pump(results=events)
        masks = MaskActor(scheduler=events)
        scheduler = SchedulerActor(
            SchedulerState(spec, debug_checks=debug.debug_checks),
            SchedulerPorts(loaded.executor, pump.inbox, detokenizer.inbox, masks.inbox),
            watch=SchedulerWatch(self.trace, (self.metrics, StepLog()), recorder),
            inbox=events,
        )
        grammars = self._grammar_library(loaded)
        limits = PromptLimits(spec.max_model_len, spec.vocab_size, loaded.defaults.max_new_tokens)
        encoder = PromptEncoder(loaded.tokenizer, template=loaded.template, limits=limits)
        self.desk.open(encoder)
        tokenizer = TokenizerActor(
            encoder,
            detokenizer=detokenizer.inbox,
            scheduler=events,
            grammars=GrammarPorts(functools.partial(constrain, grammars), masks.inbox),
            codec=self._codec_of(TokenizerEvent),
        )
        actors = (detokenizer, pump, masks, scheduler, tokenizer)
        self.metrics.watch_inboxes({actor.name: actor.inbox.__len__ for actor in actors})
        supervisor = Supervisor(actors, requests=self, report=self._report)
        return _Engine(loaded.executor, tokenizer.inbox, supervisor, grammars, recorder)

    def _grammar_library(self, loaded: Loaded) -> GrammarLibrary:
        options = self.resolved.grammar
        return GrammarLibrary(
            lambda: vocabulary_of(loaded.tokenizer, loaded.executor.spec.vocab_size),
            CompileLimits(
                timeout_s=options.grammar_timeout,
                memory_bytes=options.grammar_memory,
                num_workers=options.grammar_workers,
            ),
            cache_bytes=options.grammar_cache,
            metrics=GrammarMetrics(self.metrics.registry),
        )

    def _codec_of(self, kind: object) -> Codec | None:
        return Codec(kind) if self._codec else None


@dataclass(frozen=True, slots=True)
class _Engine:
    executor: LocalExecutor
    inbox: Channel[TokenizerEvent]
    supervisor: Supervisor
    grammars: GrammarLibrary
    recorder: Recorder | None


async def _warmed_up(executor: LocalExecutor) -> None:
    """One step, or the executor's death: a thread that has gone would never answer."""
    try:
        async with asyncio.TaskGroup() as group:
            step = group.create_task(executor.warm_up())
            executor.died.add_done_callback(lambda _: step.cancel())
    except* AserveError as errors:
        raise errors.exceptions[0] from None
    if step.cancelled():
        raise EngineDead(f"the executor died in its first step: {executor.died.result()!r}")


def load(resolved: Resolved) -> Loaded:
    """Everything that takes time and blocks: run it in a thread."""
    from aserve.gpu.weights.hub import resolve_model_dir

    is_dummy = resolved.model.load_format == "dummy"
    model_dir = resolve_model_dir(resolved.model_source, has_weights=not is_dummy)
    text = load_text(model_dir, resolved.model)
    from aserve.gpu.build import BuildOptions, build_executor  # a second, once all else is right

    options = BuildOptions(
        model_dir=model_dir,
        load_format=resolved.model.load_format,
        model_impl=resolved.model.model_impl,
        dtype=resolved.model.dtype,
        quantization=resolved.model.quantization,
        max_model_len=resolved.model.max_model_len,
        page_size=resolved.kv.page_size,
        num_pages=resolved.kv.num_pages,
        prefix_cache=not resolved.kv.no_prefix_cache,
        max_rows=resolved.scheduler.max_num_seqs,
        max_batched_tokens=resolved.scheduler.max_num_batched_tokens,
        max_waiting=resolved.scheduler.max_queue,
        depth=resolved.scheduler.depth,
        lead=resolved.scheduler.lead,
        debug_checks=resolved.debug.debug_checks,
        attention=resolved.machine.attention_backend,
        device=resolved.machine.device,
        threads=resolved.machine.threads,
    )
    with shown_progress("loading weights") as on_progress:
        executor = build_executor(options, on_progress=on_progress)
    return Loaded(executor, text.tokenizer, text.template, executor.about, text.defaults)


def vocabulary_of(tokenizer: TextTokenizer, vocab_size: int) -> Vocabulary:
    """Special tokens have no text, so no language has them. Takes a while for a large one."""
    ids = range(min(tokenizer.vocab_size, vocab_size))
    return Vocabulary(
        tuple(b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in ids),
        vocab_size=vocab_size,
        end_ids=tokenizer.eos_ids,
    )


def in_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Runs `work` beside the loop, in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    results: list[T] = []

    def settle(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(results[0])
        else:
            future.set_exception(error)

    def on_end(error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, error)

    Worker(name, lambda: results.append(work()), on_end=on_end).start()
    return future


def seed_source(seed: int | None) -> Callable[[], int]:
    """Where requests without a seed get theirs."""
    if seed is None:
        return random_seed
    numbers = random.Random(seed)
    return lambda: numbers.getrandbits(SEED_BITS)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(resolved: Resolved) -> int:
    """Serves until a signal or a death; the process's exit code."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(Serving(resolved).run())


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


def announce(resolved: Resolved, loaded: Loaded, address: str) -> None:
    """What was chosen, in two lines: nobody has to guess a default."""
    spec, options = loaded.executor.spec, resolved.scheduler
    pages = spec.groups[0].num_pages - 1
    console = Console(soft_wrap=True)
    console.print(
        f"aserve: {resolved.model_name} at {address}, {loaded.about}, "
        f"context {spec.max_model_len} tokens",
        highlight=False,
        markup=False,
    )
    console.print(
        f"aserve: KV {pages} pages of {spec.page_size} = {pages * spec.page_size} tokens; "
        f"{spec.max_rows} rows, queue {options.max_queue}, depth {spec.depth}, lead {spec.lead}",
        highlight=False,
        markup=False,
    )


class Serving:
    """One life of the server: bind, load, serve, drain, close. `address` is known once bound."""

    def __init__(self, resolved: Resolved, *, loader: Callable[[Resolved], Loaded] = load) -> None:
        self.address = ""
        self._resolved = resolved
        self._loader = loader
        self._ending = asyncio.Event()  # set by a signal, or by a death
        self._loading: asyncio.Future[Loaded | None] | None = None  # None: stopped meanwhile
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
        self._loading = in_thread(self._load, name="load")
        loaded = await self._loading
        if loaded is None:
            return
        await self._app.start(loaded)
        gc.collect()
        gc.freeze()  # PERF: what lives as long as the process is looked at by no later collection
        announce(self._resolved, loaded, self.address)
        await self._ending.wait()
        await self._app.drain(self._resolved.server.drain_timeout)

    def _signalled(self) -> None:
        """The second signal doesn't wait for open streams."""
        if self._ending.is_set():
            self._app.end_all(ShuttingDown("the server was stopped").info())
        self._ending.set()
        if self._loading is not None and not self._loading.done():
            self._loading.set_result(None)

    def _load(self) -> Loaded | None:
        return self._loader(self._resolved)
