"""Keeps the last requests and steps with their times, for the live view.

`Metrics` alone writes it, from the same messages that it counts.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable

import msgspec

from aserve.messages.output import Usage
from aserve.messages.requests import GenerateRequest
from aserve.observability.reports import RequestState

MAX_ENDED = 256  # requests
MAX_STEPS = 512
MAX_SHOWN = 512  # open requests in one snapshot
MAX_SPANS = 64  # of one request
WATCH_S = 10.0  # after a snapshot somebody is taken to watch


class Span(msgspec.Struct, array_like=True, gc=False):
    """A time that a request spent in one state (see latency.py), or from one of its prefill chunks
    to the next. It ends where the next span starts.
    """

    state: str
    started_s: float
    num_chunks: int = 0


class RequestRecord(msgspec.Struct):
    """Times are seconds of the frontend's clock, 0 if it has not happened. A request is admitted
    with its first sequence. Only a request that was received while somebody watched has spans.
    """

    request_id: str
    received_s: float
    num_sequences: int = 1
    num_admissions: int = 0  # of its sequences; one that was retracted is admitted again
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: dict[int, int] = {}  # by child
    spans: tuple[Span, ...] = ()

    def use(self, child: int, usage: Usage) -> int:
        """Notes the usage of a child so far. Returns its new tokens."""
        before = self.completion_tokens.get(child, 0)
        self.completion_tokens[child] = max(before, usage.completion_tokens)
        self.prompt_tokens = usage.prompt_tokens
        self.cached_tokens = usage.cached_tokens
        return self.completion_tokens[child] - before

    def enter(self, report: RequestState) -> None:
        if not self.spans:
            return
        started_s = max(report.at_s, self.spans[-1].started_s)
        self.spans += (Span(report.state, started_s, report.num_chunks),)
        if len(self.spans) > MAX_SPANS:
            self.spans = thinned(self.spans)


def thinned(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Returns at most about half of the spans: the shorter ones become a part of the span before.
    The first and the last span stay.
    """
    lengths_s = [after.started_s - span.started_s for span, after in itertools.pairwise(spans)]
    shortest = sorted(range(1, len(lengths_s)), key=lengths_s.__getitem__)
    dropped = set(shortest[: len(spans) // 2])
    kept: list[Span] = []
    for at, span in enumerate(spans):
        goes_on = bool(kept) and kept[-1].state == span.state and not span.num_chunks
        if at in dropped or goes_on:
            kept[-1].num_chunks += span.num_chunks
        else:
            kept.append(span)
    return tuple(kept)


class StepRecord(msgspec.Struct, frozen=True, gc=False):
    """The state after a tick that launched steps (see LaunchedSteps). `host_ms` and `device_ms` are
    the times of all ticks since the last record (see TickReport).
    """

    at_s: float
    iteration: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    used_pages: int
    total_pages: int
    num_retracted: int  # since the start
    num_prefill_rows: int = 0
    num_decode_rows: int = 0
    host_ms: float = 0.0
    device_ms: float = 0.0


class Snapshot(msgspec.Struct, frozen=True):
    now_s: float
    requests: list[RequestRecord]
    steps: list[StepRecord]


class Recent:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.open: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=MAX_ENDED)
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._watched_until_s = -math.inf

    def receive(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request, which is to be timed if somebody watches."""
        now = self.clock()
        record = RequestRecord(request.request_id, now, request.sampling.n)
        self.open[request.request_id] = record
        if now >= self._watched_until_s:
            return request
        record.spans = (Span("tokenize", now),)
        started_s = now if request.started_s is None else request.started_s
        return msgspec.structs.replace(request, started_s=started_s)

    def on_state(self, report: RequestState) -> None:
        record = self.open.get(report.request_id)
        if record is not None:
            record.enter(report)

    def end(self, request_id: str, outcome: str, reason: str) -> RequestRecord:
        record = self.open.pop(request_id)
        record.ended_s = self.clock()
        record.outcome, record.reason = outcome, reason
        self._ended.append(record)
        return record

    def add_step(self, step: StepRecord) -> None:
        self._steps.append(step)

    def snapshot(self, since_s: float = 0.0) -> Snapshot:
        """Returns the open requests, oldest first, and what ended or was launched since then. Who
        asks for it watches for a while.
        """
        self._watched_until_s = self.clock() + WATCH_S
        ended = [record for record in self._ended if record.ended_s >= since_s]
        shown = list(self.open.values())[:MAX_SHOWN]
        steps = [step for step in self._steps if step.at_s >= since_s]
        return Snapshot(self.clock(), ended + shown, steps)
