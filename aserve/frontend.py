"""Connects the two halves of an engine: the client and text side, and the engine core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from aserve.actors.admission import TokenizeQueue
from aserve.actors.detokenizer import DetokenizerActor
from aserve.actors.supervisor import Failure, Supervisor
from aserve.actors.tokenizer import TokenizerActor
from aserve.channel import Channel
from aserve.config import Resolved
from aserve.engine_core import EngineCore, EngineCorePorts, LocalEngineCore
from aserve.errors import BugError, ErrorInfo
from aserve.grammar.process import CompileProcess
from aserve.host.environment import prepare_process
from aserve.host.heap import HeapTrimmer
from aserve.http.lora.registry import LoraRegistry
from aserve.http.state import ServerState
from aserve.http.tokenize_service import TokenizeService
from aserve.load import Loaded, vocabulary_of
from aserve.messages.base import ServerPhase
from aserve.messages.changes import Amend
from aserve.messages.output import DetokenizerEvent, OutputChunk
from aserve.messages.requests import Cancel, GenerateRequest, TokenizerEvent
from aserve.observability.metrics import Metrics
from aserve.observability.reports import EngineReport
from aserve.observability.request_log import request_log_of
from aserve.observability.trace import Trace
from aserve.pictures.fetch import MediaFetcher
from aserve.pictures.reader import PictureReader
from aserve.pictures.source import MediaDomains
from aserve.request_stream import Gateway
from aserve.text.lengths import PromptLimits
from aserve.text.load import TextSide
from aserve.text.prompt import PromptEncoder


class Frontend:
    """The whole engine: it takes GenerateRequests in its gateway and returns OutputChunks in
    RequestStreams.

    `state` says whether it accepts requests. `ports` receive the core's outputs.
    """

    def __init__(
        self,
        resolved: Resolved,
        *,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        prepare_process(resolved.machine.threads)
        self.resolved = resolved
        self.state = ServerState()
        self.metrics = Metrics(request_log_of(resolved.server))
        self.gateway = Gateway(
            submit=self._submit,
            cancel=self._cancel,
            max_unread_bytes=resolved.server.max_unread_bytes,
        )
        self.loras = LoraRegistry(resolved.lora, slots_in_use=self.gateway.lora_slots)
        self.tokenize_service = TokenizeService()
        self._domains = MediaDomains.parse(resolved.server.allow_media_domains)
        self._on_death = on_death
        self._trace = Trace()
        self._text: Channel[DetokenizerEvent] = Channel()
        self.ports = EngineCorePorts(self._text, self._on_report, self._trace)
        self._running: _Running | None = None
        self._heap = HeapTrimmer()
        self._is_closed = False

    @property
    def failure(self) -> Failure | None:
        return self._running.supervisor.failure if self._running else None

    async def start(self, loaded: Loaded, worker: CompileProcess | None = None) -> None:
        """Starts a core in this process and joins it. A server has a grammar worker."""
        executor, text = loaded.executor, loaded.text
        vocabulary = functools.partial(vocabulary_of, text.tokenizer, executor.spec.vocab_size)
        core = LocalEngineCore(executor, self.resolved, ports=self.ports, vocabulary=vocabulary)
        await self.join(core, text)
        if worker is not None:
            core.grammars.adopt(worker)

    async def join(self, core: EngineCore, text: TextSide) -> None:
        """Connects a core and returns when the engine is ready: one step has run, and the actors
        read their inboxes.
        """
        supervisor = self._connect(core, text)
        await core.start(supervisor.report_death)
        supervisor.start()
        self._heap.start()
        self.state.settings.open(core.spec, core.inbox.send, self.gateway, self.metrics.log)
        self.state.max_model_len = core.spec.max_model_len
        asked = self.resolved.server.max_sequences_per_request
        self.state.max_sequences = asked or core.spec.max_rows
        self.state.engine_age_s = core.age_s
        self.state.defaults = text.defaults
        self.state.parsers = text.parsers
        self.state.pooling = text.pooling
        await self.loras.open(core.run_job)
        self._report("ready", "")

    async def drain(self, grace_s: float) -> None:
        if self._running is not None:
            await self._running.supervisor.drain(grace_s)

    async def close(self) -> None:
        """Ends open requests, and all tasks and threads."""
        running = self._running
        if running is None or self._is_closed:
            return
        self._is_closed = True
        self._heap.stop()
        await running.supervisor.drain(0)
        await running.supervisor.stop()
        self.tokenize_service.close()
        await running.core.close()

    def end_all(self, error: ErrorInfo) -> None:
        self.gateway.end_all(error)
        self.metrics.all_ended(error.code)

    async def drained(self) -> None:
        await self.gateway.drained()

    def _submit(self, request: GenerateRequest) -> None:
        """Sends a request to the tokenizer. NOTE: callers must check `state.refusal()` first."""
        if self._running is None:
            raise BugError(f"request {request.request_id} was submitted before the engine started")
        self._running.inbox.send(self.metrics.received(request))

    def _cancel(self, message: Cancel | Amend) -> None:
        if self._running is not None:
            self._running.inbox.send(message)

    def _deliver(self, chunk: OutputChunk) -> None:
        chunk = self.metrics.delivered(chunk)
        self._trace.delivered(chunk)
        self.gateway.deliver(chunk)

    def _on_report(self, report: EngineReport) -> None:
        self.metrics.on_report(report)
        self.state.watch.on_report(report)

    def _report(self, phase: ServerPhase, reason: str) -> None:
        self.state.phase = phase
        self.state.reason = reason
        if phase == "dead":
            self._on_death()

    def _connect(self, core: EngineCore, text: TextSide) -> Supervisor:
        detokenizer = DetokenizerActor(
            text.tokenizer,
            deliver=self._deliver,
            answer=self.gateway.amendments.receive,
            engine=core.inbox,
            inbox=self._text,
            story=self._trace.story,
        )
        spec = core.spec
        limits = PromptLimits(
            spec.max_model_len,
            spec.vocab_size,
            text.defaults.max_new_tokens,
            page_size=spec.page_size if spec.prefix_cache else 0,
            auto_truncate=self.resolved.model.allow_auto_truncate,
            task=spec.task,
            whole_prompts=spec.whole_prompts,
            affixes=text.pooling.affixes if spec.task != "generate" else (0, 0),
        )
        pictures = PictureReader(text.pictures, self._domains)
        encoder = PromptEncoder(
            text.tokenizer,
            template=text.template,
            limits=limits,
            allow_special=self.resolved.model.allow_special_tokens_in_content,
            pictures=pictures,
        )
        self.tokenize_service.open(encoder, media := MediaFetcher(pictures))
        tokenizer = TokenizerActor(
            encoder,
            detokenizer=detokenizer.inbox,
            engine=core.inbox,
            queue=TokenizeQueue(
                max_requests=self.resolved.scheduler.max_queue,
                max_chars=self.resolved.scheduler.max_prompt_queue,
            ),
            story=self._trace.story,
            media=media,
        )
        actors = (detokenizer, *core.actors, tokenizer)
        self.metrics.watch_inboxes({actor.name: actor.backlog for actor in actors})
        supervisor = Supervisor(actors, requests=self, report=self._report)
        self._running = _Running(core, tokenizer.inbox, supervisor)
        return supervisor


@dataclass(frozen=True, slots=True)
class _Running:
    core: EngineCore
    inbox: Channel[TokenizerEvent]
    supervisor: Supervisor
