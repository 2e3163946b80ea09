"""Explains where the time of a request went, for clients that ask and for the access log.

At each moment a request is in one state. The frontend knows when it began to receive the request,
and submitted it; the engine reports each later change of state. The times of the states therefore
add up to the whole. `Latency` alone writes the timelines of a frontend.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from aserve.messages.base import num_values
from aserve.messages.output import OutputChunk, Usage
from aserve.messages.requests import ChatPrompt, GenerateRequest, SamplingParams
from aserve.observability.draft_counts import DraftCounts
from aserve.observability.reports import RequestState

TRACE_LEVELS = (0, 1, 2, 3)  # SGLang's; here the last two mean the same
MAX_ENDED = 1024  # timelines that are kept until their answer is written

QUEUED = "queue_"
# The states in their order, with what they mean. The queue has a state for each reason to wait.
STATES = {
    "receive": "its head, body and checks",
    "tokenize": "template and tokenizer, and the wait for a thread",
    "grammar_compile": "its grammar is compiled",
    "queue_rows": "all rows run",
    "queue_pages": "it waits for KV pages, or for the prompts before it",
    "queue_share": "its client has its share of rows",
    "queue_prefix": "another request computes the prefix that they share",
    "queue_masks": "rows with slow token masks are limited",
    "prefill": "its prompt is computed, to the first token, or again after a retraction",
    "decode": "its other tokens",
    "grammar": "a token mask is awaited",
    "retracted": "it gave its row back, and waits again",
    "flush": "from the engine's last token to the answer",
}


class Timings(msgspec.Struct):
    """The names up to `cache_n`, and the first two of drafts, are those of llama.cpp. `states` has
    milliseconds by state. Without drafts there are no numbers of them.
    """

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    cache_n: int
    queue_ms: float
    total_ms: float
    prefill_chunks: int
    num_retractions: int
    states: dict[str, float]
    itl_p50_ms: float | UnsetType = UNSET  # between chunks, when the server had them
    itl_p99_ms: float | UnsetType = UNSET
    itl_max_ms: float | UnsetType = UNSET
    draft_n: int | UnsetType = UNSET  # verified
    draft_n_accepted: int | UnsetType = UNSET
    draft_windows: int | UnsetType = UNSET  # decodes that verified drafts
    accept_len: float | UnsetType = UNSET  # mean tokens of a window
    accept_rates: list[float] | UnsetType = UNSET  # windows that accepted their first draft, ...
    accept_histogram: list[int] | UnsetType = UNSET  # windows that accepted no draft, one, ...


class Phase(NamedTuple):
    """A time in which a request was in states of one kind, for a span."""

    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Timeline:
    """`times` are the seconds in each state that has ended, in the order in which they began."""

    started_s: float
    sampling: SamplingParams
    operation: str = "text_completion"
    traceparent: str = ""  # of the client's trace, if it has one
    state: str = "receive"
    since_s: float = 0.0
    times: dict[str, float] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    num_chunks: int = 0
    num_retractions: int = 0
    num_tokens: int = 0  # of all choices
    usages: dict[int, Usage] = field(default_factory=dict)  # the last one of each choice
    itls_s: list[float] = field(default_factory=list)  # between two chunks of a choice
    sent_s: dict[int, float] = field(default_factory=dict)  # when each choice had its last chunk

    def __post_init__(self) -> None:
        self.since_s = self.started_s

    def enter(self, state: str, at_s: float) -> None:
        """NOTE: a state that began before the present one did, by another process's word, begins
        with it.
        """
        at_s = max(at_s, self.since_s)
        self.times[self.state] = self.times.get(self.state, 0.0) + at_s - self.since_s
        self._end_phase(at_s)
        self.num_retractions += state == "retracted" != self.state
        self.state, self.since_s = state, at_s

    def note_chunk(self, chunk: OutputChunk, at_s: float) -> None:
        num_tokens = num_values(chunk.token_ids)
        self.num_tokens += num_tokens
        self.usages[chunk.child] = chunk.usage
        if not num_tokens:
            return
        if chunk.child in self.sent_s:
            self.itls_s.append(at_s - self.sent_s[chunk.child])
        self.sent_s[chunk.child] = at_s

    def _end_phase(self, at_s: float) -> None:
        """Notes the time in the present state, together with the one before it if both are of one
        kind: an output with a grammar changes between two states for each token.
        """
        name, start_s = phase_of(self.state), self.since_s
        if self.phases and self.phases[-1].name == name:
            start_s = self.phases.pop().start_s
        self.phases.append(Phase(name, start_s, at_s))


def phase_of(state: str) -> str:
    if state == "grammar":
        return "decode"
    return "queue" if state.startswith(QUEUED) else state


class Latency:
    """Keeps the timelines of timed requests. With `on_end` every request is timed, and its timeline
    is passed on when it ends; without its phases if `trace_level` is 1, and not at all if it is 0.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_end: Callable[[Timeline, OutputChunk], None] | None = None
        self.trace_level = TRACE_LEVELS[-1]
        self._clock = clock
        self._open: dict[str, Timeline] = {}
        self._ended: OrderedDict[str, dict[str, float]] = OrderedDict()  # seconds by state

    @property
    def is_traced(self) -> bool:
        return self.on_end is not None and self.trace_level > 0

    def submitted(self, request: GenerateRequest) -> None:
        if request.started_s is not None:
            operation = operation_of(request)
            timeline = Timeline(request.started_s, request.sampling, operation, request.traceparent)
            self._open[request.request_id] = timeline
            timeline.enter("tokenize", self._clock())

    def on_state(self, report: RequestState) -> None:
        timeline = self._open.get(report.request_id)
        if timeline is not None:
            timeline.num_chunks += report.num_chunks
            if report.state != timeline.state:
                timeline.enter(report.state, report.at_s)

    def annotated(self, chunk: OutputChunk) -> OutputChunk:
        """Adds the timings to the last chunk of a request."""
        timeline = self._open.get(chunk.request_id)
        if timeline is None:
            return chunk
        timeline.note_chunk(chunk, self._clock())
        if not chunk.is_last:
            return chunk
        del self._open[chunk.request_id]
        timeline.enter("", self._clock())
        self._ended[chunk.request_id] = timeline.times
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if self.on_end is not None and self.is_traced:
            if self.trace_level == 1:
                timeline.phases.clear()
            self.on_end(timeline, chunk)
        timings = msgspec.json.encode(timings_of(timeline, chunk))
        return msgspec.structs.replace(chunk, timings=timings)

    def end_all(self) -> None:
        """No open request gets another chunk."""
        self._open.clear()

    def server_timing(self, request_id: str) -> str | None:
        """Returns the value of a Server-Timing header (W3C), None if the request was not timed."""
        times = self._ended.get(request_id)
        return None if times is None else header_of(times)


def operation_of(request: GenerateRequest) -> str:
    """Returns the name of the operation in OpenTelemetry's conventions for generative AI."""
    if request.embeds:
        return "embeddings"
    return "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"


def header_of(times: dict[str, float]) -> str:
    parts = {**times, "total": sum(times.values())}
    return ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in parts.items())


def timings_of(timeline: Timeline, chunk: OutputChunk) -> Timings:
    times = timeline.times
    prompt_ms = 1000 * times.get("prefill", 0.0)
    decoding = ("decode", "grammar", "retracted")
    timings = Timings(
        prompt_n=chunk.usage.prompt_tokens - chunk.usage.cached_tokens,
        prompt_ms=prompt_ms,
        predicted_n=timeline.num_tokens,
        predicted_ms=1000 * sum(times.get(state, 0.0) for state in decoding),
        cache_n=chunk.usage.cached_tokens,
        queue_ms=1000 * sum(times[state] for state in times if state.startswith(QUEUED)),
        total_ms=1000 * sum(times.values()),
        prefill_chunks=timeline.num_chunks,
        num_retractions=timeline.num_retractions,
        states={state: 1000 * seconds for state, seconds in times.items()},
    )
    if timeline.itls_s:
        at_ms = [1000 * float(each) for each in np.percentile(timeline.itls_s, (50, 99, 100))]
        timings.itl_p50_ms, timings.itl_p99_ms, timings.itl_max_ms = at_ms
    drafts = sum(map(_drafts_of, timeline.usages.values()), start=DraftCounts())
    if drafts.num_windows:
        timings.draft_n, timings.draft_n_accepted = drafts.num_drafts, drafts.num_accepted
        timings.draft_windows, timings.accept_len = drafts.num_windows, drafts.accept_len
        timings.accept_rates, timings.accept_histogram = drafts.rates, drafts.histogram
    return timings


def _drafts_of(usage: Usage) -> DraftCounts:
    return DraftCounts(usage.draft_windows, usage.draft_tokens, usage.accepted_drafts)
