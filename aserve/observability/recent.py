"""Keeps the last requests and steps with their times, for the live view.

`Metrics` alone writes it, from the same messages that it counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from aserve.messages.output import Usage

MAX_ENDED = 256  # requests
MAX_STEPS = 512
MAX_SHOWN = 512  # open requests in one snapshot


class RequestRecord(msgspec.Struct):
    """Times are seconds of the frontend's clock, 0 if it has not happened. A request is admitted
    with its first sequence.
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

    def use(self, child: int, usage: Usage) -> int:
        """Notes the usage of a child so far. Returns its new tokens."""
        before = self.completion_tokens.get(child, 0)
        self.completion_tokens[child] = max(before, usage.completion_tokens)
        self.prompt_tokens = usage.prompt_tokens
        self.cached_tokens = usage.cached_tokens
        return self.completion_tokens[child] - before


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

    def receive(self, request_id: str, num_sequences: int) -> None:
        self.open[request_id] = RequestRecord(request_id, self.clock(), num_sequences)

    def end(self, request_id: str, outcome: str, reason: str) -> RequestRecord:
        record = self.open.pop(request_id)
        record.ended_s = self.clock()
        record.outcome, record.reason = outcome, reason
        self._ended.append(record)
        return record

    def add_step(self, step: StepRecord) -> None:
        self._steps.append(step)

    def snapshot(self, since_s: float = 0.0) -> Snapshot:
        """Returns the open requests, oldest first, and what ended or was launched since then."""
        ended = [record for record in self._ended if record.ended_s >= since_s]
        shown = list(self.open.values())[:MAX_SHOWN]
        steps = [step for step in self._steps if step.at_s >= since_s]
        return Snapshot(self.clock(), ended + shown, steps)
