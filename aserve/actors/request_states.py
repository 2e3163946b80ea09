"""Reports the states of requests that are timed, as each tick leaves them: see latency.py.

A request with several sequences has the state of the first one that still lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from aserve.messages.step import Launch, ScheduleBatch
from aserve.observability.reports import RequestState, SchedulerTick
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState


class RequestStates:
    """A SchedulerObserver. PERF: without timed requests a tick costs one look at its events."""

    def __init__(
        self,
        state: SchedulerState,
        report: Callable[[RequestState], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._report = report
        self._clock = clock
        self._timed: dict[str, str] = {}  # the state that was reported of each request

    def on_tick(self, tick: SchedulerTick) -> None:
        now = self._clock()
        for event in tick.events:
            if isinstance(event, AdmitRequest) and event.tokenized_s is not None:
                self._begin(event, event.tokenized_s)
        if not self._timed:
            return
        chunks = self._chunks(tick)
        for request_id, before in list(self._timed.items()):
            children = self._state.groups.get(request_id)
            state = _state_of(self._state, next(iter(children.values()))) if children else "flush"
            num_chunks = chunks.get(request_id, 0)
            if num_chunks:  # also of a sequence that was retracted, which has outputs
                state = "prefill"
            if state != before or num_chunks:
                self._report(RequestState(request_id, state, now, num_chunks))
            if children:
                self._timed[request_id] = state
            else:
                del self._timed[request_id]

    def _begin(self, request: AdmitRequest, tokenized_s: float) -> None:
        """Until the scheduler receives a request, its grammar is compiled, if it has one."""
        self._timed[request.request_id] = ""
        if request.sampling.grammar is not None:
            self._report(RequestState(request.request_id, "grammar_compile", tokenized_s))

    def _chunks(self, tick: SchedulerTick) -> dict[str, int]:
        """Returns the number of prefill chunks that the tick launched of each timed request."""
        chunks: dict[str, int] = {}
        for effect in tick.effects:
            match effect:
                case Launch() if effect.batches[0].stats.num_prefill_rows:
                    for batch in effect.batches:
                        self._count(batch, chunks)
                case _:
                    pass
        return chunks

    def _count(self, batch: ScheduleBatch, chunks: dict[str, int]) -> None:
        root_len = self._state.spec.decode.root_len
        rows, query_lens = array_i32(batch.rows).tolist(), array_i32(batch.query_lens).tolist()
        inits = {init.row for init in batch.row_inits}
        for row, query_len in zip(rows, query_lens, strict=True):
            sequence = self._state.running.get(row)
            if sequence is None or sequence.request_id not in self._timed:
                continue
            if query_len > root_len or row in inits:
                chunks[sequence.request_id] = chunks.get(sequence.request_id, 0) + 1


def _state_of(state: SchedulerState, sequence: Sequence) -> str:
    if sequence.has_ended:
        return "flush"
    if sequence.phase is Phase.RUNNING:
        held = state.held.get(sequence.row)
        if held is not None and held.iteration not in state.steps:  # only its mask is missing
            return "grammar"
        return "decode" if sequence.num_outputs else "prefill"
    if sequence.phase is Phase.AWAITING_KV:
        return "prefill"
    if sequence.cached_len >= 0:  # it had a row before
        return "retracted"
    if sequence.leader is not None:
        return "queue_prefix"
    if sequence in state.slow_waiting:
        return "queue_masks"
    return _queue_reason(state, sequence)


def _queue_reason(state: SchedulerState, sequence: Sequence) -> str:
    if state.rows.num_free:
        return "queue_pages"
    share = max(1, state.spec.max_rows // max(1, state.clients.num_active))
    has_share = state.clients.num_active > 1 and sequence.client.num_rows >= share
    return "queue_share" if has_share else "queue_rows"
