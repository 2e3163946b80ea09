"""The Prometheus metrics of requests, steps and grammars.

They are written on the event loop's thread, from requests, output chunks and the engine's reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, assert_never

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from aserve.messages.base import num_values
from aserve.messages.output import OutputChunk
from aserve.messages.requests import GenerateRequest
from aserve.observability.draft_counts import DraftMetrics
from aserve.observability.latency import Latency
from aserve.observability.recent import Recent, RequestRecord, StepRecord
from aserve.observability.reports import (
    Beat,
    EngineDown,
    EngineReport,
    EngineUp,
    GrammarCompiled,
    GrammarKnown,
    GrammarReport,
    KvTransferred,
    LaunchedSteps,
    RequestState,
    StartupStage,
    TickReport,
    TierUsed,
)
from aserve.observability.request_log import RequestLog
from aserve.observability.token_metrics import LONG_S, SHORT_S, TokenMetrics

Outcome: TypeAlias = Literal["finished", "refused", "failed", "cancelled"]

COMPILE_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    def __init__(
        self, log: RequestLog | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = CollectorRegistry()
        self.log = log or RequestLog(is_on=False)
        self._clock = clock
        self.recent = Recent(clock=clock)
        self.latency = Latency(clock=clock)
        self._open = self.recent.open
        self._requests = _RequestMetrics(self.registry)
        self._steps = _StepMetrics(self.registry)
        self._grammars = GrammarMetrics(self.registry)
        self._transfers = TransferMetrics(self.registry)
        self._tiers = TierMetrics(self.registry)
        self._host_s = self._device_s = 0.0  # of the ticks since the last that launched steps

    def received(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request, which is to be timed if somebody watches the live view."""
        self.log.received(request)
        self.latency.submitted(request)
        self._requests.received.inc()
        self._requests.in_flight.inc()
        return self.recent.receive(request)

    def delivered(self, chunk: OutputChunk) -> OutputChunk:
        """Returns the chunk, with its timings if it is the last one of a request that is timed."""
        self.log.delivered(chunk)
        state = self._open.get(chunk.request_id)
        if state is not None:
            self._count(chunk, state)
        return self.latency.annotated(chunk)

    def _count(self, chunk: OutputChunk, state: RequestRecord) -> None:
        if chunk.token_ids:
            num_tokens = num_values(chunk.token_ids)
            self._requests.tokens.note_times(state, self._clock(), num_tokens=num_tokens)
        self._requests.tokens.add_sent(state.use(chunk.child, chunk.usage))
        if chunk.is_last:
            self._requests.prompt_tokens.inc(chunk.usage.prompt_tokens)
            self._requests.cached_tokens.inc(chunk.usage.cached_tokens)
            self._end(chunk.request_id, *_ending(chunk, was_admitted=state.admitted_s > 0))

    def all_ended(self, reason: str) -> None:
        """Counts all open requests as failed, because the engine has died or shut down."""
        self.log.all_ended(reason)
        self.latency.end_all()
        for request_id in list(self._open):
            self._end(request_id, "failed", reason)

    def on_report(self, report: EngineReport) -> None:
        match report:
            case TickReport():
                self._admitted(report.admitted)
                self._steps.on_tick(report)
                self._note_step(report)
            case GrammarKnown() | GrammarCompiled():
                self._grammars.on_report(report)
            case KvTransferred():
                self._transfers.on_report(report)
            case TierUsed():
                self._tiers.on_report(report)
            case Beat():
                for actor, backlog in report.backlogs:
                    self._steps.backlog.labels(actor).set(backlog)
            case EngineDown():
                self._steps.on_engine_down(is_restart=report.is_restart)
            case RequestState():
                self.latency.on_state(report)
                self.recent.on_state(report)
            case StartupStage() | EngineUp():
                pass
            case _:
                assert_never(report)

    def watch_inboxes(self, backlogs: Mapping[str, Callable[[], float]]) -> None:
        for actor, backlog in backlogs.items():
            self._steps.backlog.labels(actor).set_function(backlog)

    def _admitted(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            state = self._open.get(request_id)
            if state is None:
                continue
            state.num_admissions += 1
            if not state.admitted_s:
                state.admitted_s = self._clock()
                self._requests.queue_s.observe(state.admitted_s - state.received_s)

    def _note_step(self, report: TickReport) -> None:
        self._host_s += report.host_s
        self._device_s += report.device_s
        steps = report.launched
        if steps is None:
            return
        self.recent.add_step(
            StepRecord(
                self._clock(),
                steps.iteration,
                steps.num_prefill_tokens,
                report.num_running,
                report.num_waiting,
                report.used_pages,
                steps.total_pages,
                steps.num_retracted,
                steps.num_prefill_rows,
                steps.num_decode_rows,
                self._host_s * 1000,
                self._device_s * 1000,
            )
        )
        self._host_s = self._device_s = 0.0

    def _end(self, request_id: str, outcome: Outcome, reason: str) -> None:
        state = self.recent.end(request_id, outcome, reason)
        self._requests.ended.labels(outcome, reason).inc()
        self._requests.in_flight.dec()
        self._requests.e2e_s.observe(state.ended_s - state.received_s)


def _ending(chunk: OutputChunk, *, was_admitted: bool) -> tuple[Outcome, str]:
    reason = chunk.error.code if chunk.error else str(chunk.finish_reason)
    if chunk.finish_reason == "cancelled":
        return "cancelled", "cancelled"
    if chunk.error is None:
        return "finished", reason
    is_refusal = chunk.finish_reason == "error" and not was_admitted
    return ("refused" if is_refusal else "failed"), reason


class _RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.received = Counter(
            "aserve_requests_received", "Requests that were accepted for work", registry=registry
        )
        self.ended = Counter(
            "aserve_requests_ended",
            "Requests that got their final answer",
            ["outcome", "reason"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "aserve_requests_in_flight", "Requests without a final answer", registry=registry
        )
        self.prompt_tokens = Counter(
            "aserve_prompt_tokens", "Prompt tokens of ended requests", registry=registry
        )
        self.tokens = TokenMetrics(registry)
        self.cached_tokens = Counter(
            "aserve_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.queue_s = Histogram(
            "aserve_queue_seconds", "Arrival to first step", buckets=LONG_S, registry=registry
        )
        self.e2e_s = Histogram(
            "aserve_request_seconds", "Arrival to final answer", buckets=LONG_S, registry=registry
        )


class _StepMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.launched = Counter("aserve_steps_launched", "Steps launched", registry=registry)
        self.finished = Counter("aserve_steps_finished", "Steps with a result", registry=registry)
        self.failed = Counter(
            "aserve_steps_failed", "Failed steps and those dropped after one", registry=registry
        )
        self.iteration = Gauge(
            "aserve_forward_iteration", "Number of the last launched step", registry=registry
        )
        self.retractions = Counter(
            "aserve_retractions", "Times that a running sequence was retracted", registry=registry
        )
        self.ran = Counter(
            "aserve_steps_ran",
            "Steps by how they ran: replayed, forward, pieces or eager; devices with graphs alone",
            ["how"],
            registry=registry,
        )
        self._num_retracted = 0  # as of the last launch
        self._drafts = DraftMetrics(registry)
        self.decodes = Counter(
            "aserve_decodes",
            "Decodes, each of one sequence in one step; some give several tokens or none",
            registry=registry,
        )
        self.prefill_tokens = Counter(
            "aserve_prefill_tokens",
            "Prompt tokens computed, also those computed again",
            registry=registry,
        )
        self.running = Gauge("aserve_sequences_running", "Sequences with a row", registry=registry)
        self.waiting = Gauge("aserve_sequences_waiting", "Sequences in queue", registry=registry)
        self.waiting_clients = Gauge(
            "aserve_clients_waiting", "Clients with sequences in queue", registry=registry
        )
        self.backlog = Gauge(
            "aserve_inbox_messages", "Messages that wait for an actor", ["actor"], registry=registry
        )
        self.used_pages = Gauge("aserve_kv_pages_used", "KV pages in use", registry=registry)
        self.cached_pages = Gauge(
            "aserve_kv_pages_cached", "KV pages of the prefix cache alone", registry=registry
        )
        self.total_pages = Gauge("aserve_kv_pages", "KV pages in all", registry=registry)
        self.engine_restarts = Counter(
            "aserve_engine_restarts",
            "Times that the engine process died and was started again",
            registry=registry,
        )

    def on_tick(self, report: TickReport) -> None:
        self.finished.inc(report.num_finished)
        self.failed.inc(report.num_failed)
        for how in report.ran:
            self.ran.labels(how).inc()
        if report.launched is not None:
            self._launch(report.launched)
        self.running.set(report.num_running)
        self.waiting.set(report.num_waiting)
        self.waiting_clients.set(report.num_waiting_clients)
        self.used_pages.set(report.used_pages)
        self.cached_pages.set(report.cached_pages)
        if report.drafts is not None:
            self._drafts.on_counts(report.drafts)

    def on_engine_down(self, *, is_restart: bool) -> None:
        """The next engine begins with nothing, and counts from 0."""
        self.engine_restarts.inc(is_restart)
        for gauge in (self.running, self.waiting, self.waiting_clients, self.used_pages):
            gauge.set(0)
        self._num_retracted = 0

    def _launch(self, steps: LaunchedSteps) -> None:
        self.launched.inc(steps.num_steps)
        self.iteration.set(steps.iteration)
        self.prefill_tokens.inc(steps.num_prefill_tokens)
        self.decodes.inc(steps.num_decodes)
        self.retractions.inc(steps.num_retracted - self._num_retracted)
        self._num_retracted = steps.num_retracted
        self.total_pages.set(steps.total_pages)


class GrammarMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._compiles = Counter(
            "aserve_grammar_compiles",
            "Grammars that were compiled, by outcome",
            ["outcome"],
            registry=registry,
        )
        self._compile_s = Histogram(
            "aserve_grammar_compile_seconds",
            "From the request for a grammar to its outcome, with the time in the queue",
            buckets=COMPILE_S,
            registry=registry,
        )
        self._cache_hits = Counter(
            "aserve_grammar_cache_hits",
            "Requests whose grammar was in the cache, valid or not, or was being compiled",
            registry=registry,
        )

    def on_report(self, report: GrammarReport) -> None:
        match report:
            case GrammarKnown():
                self._cache_hits.inc()
            case GrammarCompiled():
                self._compiles.labels(report.outcome).inc()
                self._compile_s.observe(report.seconds)
            case _:
                assert_never(report)


class TransferMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "aserve_kv_transfer_seconds",
            "Transfers of KV between engines, from the request to the last byte",
            ["direction", "outcome"],
            buckets=SHORT_S,
            registry=registry,
        )
        self._bytes = Counter(
            "aserve_kv_transfer_bytes",
            "KV that was sent to other engines or received from them",
            ["direction", "transport"],
            registry=registry,
        )

    def on_report(self, report: KvTransferred) -> None:
        self._seconds.labels(report.direction, report.outcome).observe(report.seconds)
        self._bytes.labels(report.direction, report.transport).inc(report.num_bytes)


class TierMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._bytes = Counter(
            "aserve_kv_tier_bytes",
            "KV that went down to a tier below the prefix cache, or came up from it",
            ["tier", "direction"],
            registry=registry,
        )
        self._held = Gauge(
            "aserve_kv_tier_held_bytes",
            "KV that a tier below the prefix cache holds",
            ["tier"],
            registry=registry,
        )

    def on_report(self, report: TierUsed) -> None:
        self._bytes.labels(report.tier, report.direction).inc(report.num_bytes)
        if report.held_bytes is not None:
            self._held.labels(report.tier).set(report.held_bytes)
