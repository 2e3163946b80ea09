"""The executor thread: runs what it is given, in order, on one stream; a step that fails is a
value, and fails every later one up to the Resync.

It decides nothing and never waits for the device. What two threads share is written by one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.errors import AserveError, BugError, EngineDead, ErrorInfo, StepError
from aserve.gpu.cudagraph.graphs import StepGraphs
from aserve.gpu.cudagraph.warmup import padding_batch
from aserve.gpu.device.base import Device, Event, slice_len_of
from aserve.gpu.runner import ModelRunner
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.future_map import SEQ_LEN
from aserve.gpu.step.inputs import HeldSample
from aserve.gpu.step.plan import LogitsPlan, StepPlan, plan_logits, plan_step
from aserve.gpu.step.results import Layout, Tokens, check_step, read_tokens, seq_lens
from aserve.gpu.step.ticket import Outcome, StepTicket
from aserve.gpu.transfer.pinned import PinnedSlot, PinnedSlots
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.gpu.waiter import Landing, Waiter
from aserve.host.threads import SWITCH_INTERVAL_S, Worker
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.requests import stamp_of
from aserve.messages.results import StepFailed
from aserve.messages.step import Resync, Sample, ScheduleBatch

Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    runner: ModelRunner
    device: Device
    spec: EngineSpec
    graphs: StepGraphs
    is_debug: bool
    about: str  # what was chosen for this machine, in a few words


class TorchExecutor:
    """Implements messages.Executor; all public methods belong to the loop's thread."""

    def __init__(self, parts: ExecutorParts) -> None:
        self.spec = parts.spec
        self.about = parts.about
        self.died: asyncio.Future[BaseException]
        self._runner = parts.runner
        self._device = parts.device
        self._graphs = parts.graphs
        self._is_debug = parts.is_debug
        self._slice_len = slice_len_of(parts.device, vocab_size=parts.spec.vocab_size)
        self._row_params = RowParams(parts.spec.max_rows)
        self._held_lens: dict[int, int] = {}  # bounds, by row: what a Sample's history may reach
        self._has_failed = False  # written by the executor thread
        self._good_from = 0  # the last Resync's iteration: written by the executor thread
        self._invalid_at = -1  # a step whose result was no good: written by the waiter
        self._is_closed = False
        self._staging = PinnedSlots(parts.device, is_debug=parts.is_debug)
        self._staged: list[PinnedSlot] = []  # since the last event: written by the executor thread
        self._results = PinnedSlots(parts.device, is_debug=parts.is_debug)
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._worker = Worker("aserve-executor", self._run, on_end=self._ended)
        self._loop: asyncio.AbstractEventLoop
        self._waiter: Waiter

    # ------------------------------------------------------------ the loop's side

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop = loop
        self.died = loop.create_future()
        self._waiter = Waiter(loop, on_end=self._ended)
        self._waiter.start()
        self._worker.start()

    def capture_graphs(self, on_progress: Callable[[int, int], None]) -> None:
        """All that there may be, before the start, on the calling thread."""
        total = self._graphs.request_all()
        with torch.inference_mode(), self._device.stream():
            for number in range(total):
                if self._graphs.has_pending:
                    self._capture()
                on_progress(number + 1, total)

    async def warm_up(self) -> None:
        """One prefill and one decode of the padding row: no request's state is touched."""
        for query_len in (2, 1):
            batch = padding_batch(query_len, num_groups=len(self.spec.groups))
            ticket = self.launch(batch)
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait((ticket.outcome, self.died), return_when=first)
            if self.died.done():
                raise EngineDead(f"the device thread ended: {self.died.result()!r}")
            outcome = ticket.outcome.result()
            if isinstance(outcome, StepFailed):
                raise EngineDead(f"the warm-up step failed: {outcome.error.message}")

    def launch(self, batch: ScheduleBatch) -> StepTicket:
        ticket = StepTicket(batch.iteration, self._loop)
        self._inbox.put(functools.partial(self._try, ticket, lambda: self._step(batch, ticket)))
        return ticket

    def sample(self, sample: Sample) -> StepTicket:
        ticket = StepTicket(sample.iteration, self._loop)
        self._inbox.put(functools.partial(self._try, ticket, lambda: self._sample(sample, ticket)))
        return ticket

    def resync(self, resync: Resync) -> None:
        self._inbox.put(functools.partial(self._resync, resync.iteration))

    def close(self) -> None:
        """What was launched still runs to its end; afterwards no thread is left."""
        if self._is_closed:
            return
        self._is_closed = True
        self._inbox.put(None)
        self._worker.join()
        self._waiter.close()

    # ------------------------------------------------------------ the executor thread

    def _run(self) -> None:
        with torch.inference_mode(), self._device.stream():
            while (job := self._next()) is not None:
                job()

    def _next(self) -> Job | None:
        """A step waits for one capture at most, and only if it comes while that is running."""
        while self._graphs.has_pending and self._inbox.empty():
            self._capture()
        return self._inbox.get()

    def _capture(self) -> None:
        try:
            self._graphs.capture_next()
        except Exception as error:
            self._device.mark()  # which a ruined device refuses, too
            self._graphs.refuse(error)

    def _try(self, ticket: StepTicket, work: Job) -> None:
        """Any exception of a step is that step's failure; the thread goes on. A device that has
        been ruined raises again in `_fail`: then the thread ends, and the engine with it.
        """
        if self._has_failed or self._invalid_at >= self._good_from:
            self._fail(ticket, StepError("an earlier step failed").info())
            return
        try:
            work()
        except AserveError as error:
            self._fail(ticket, error.info())
        except Exception as error:
            self._fail(ticket, StepError(f"{type(error).__name__}: {error}").info())

    def _fail(self, ticket: StepTicket, error: ErrorInfo) -> None:
        self._has_failed = True
        failed = StepFailed(ticket.iteration, error)
        self._land(self._device.mark(), lambda: functools.partial(ticket.complete, failed))

    def _resync(self, iteration: int) -> None:
        self._has_failed = False
        self._good_from = iteration
        self._held_lens.clear()

    def _step(self, batch: ScheduleBatch, ticket: StepTicket) -> None:
        self._row_params.write(batch.row_inits)
        vocab_size, slice_len = self.spec.vocab_size, self._slice_len
        plan = plan_step(batch, self._row_params, vocab_size=vocab_size, slice_len=slice_len)
        publish = functools.partial(self._publish, plan, ticket)
        graph = self._graphs.find(plan)
        if graph is not None:
            padded = graph.padded(plan)
            arrays = self._runner.stage(padded)
            self._stage(arrays, buffer=graph.room_for(arrays))
            packed = self._graphs.replay(graph, padded, publish)
        else:
            staged = self._stage(self._runner.stage(plan))
            self._runner.apply(batch, staged)
            packed = self._runner.step(plan, staged, publish)
        self._held_lens.update(_ends(plan))
        read = functools.partial(self._read_step, plan, packed.layout, ticket)
        self._copy_out(packed.words, read)

    def _sample(self, sample: Sample, ticket: StepTicket) -> None:
        rows = array_i32(sample.rows)
        if missing := [int(row) for row in rows if int(row) not in self._held_lens]:
            raise BugError(f"step {sample.iteration}: rows {missing} are sampled, but not held")
        max_len = max(self._held_lens[int(row)] for row in rows)
        logits = self._plan_held(rows, max_len)
        arrays = HostArrays()
        logits.stage(arrays)
        arrays.add("iteration", np.array([stamp_of(sample.iteration)], np.int32))
        arrays.add("mask", array_i32(sample.masks))
        staged = self._stage(arrays)
        packed = self._runner.finish_held(
            HeldSample(
                iteration=staged.ints("iteration"),
                rows=staged.ints("sample_rows"),
                mask=staged.narrow_ints("mask").view(len(rows), -1),
                logits=logits,
                arrays=staged,
            )
        )
        for row in rows:
            del self._held_lens[int(row)]
        read = functools.partial(self._read_sample, logits, packed.layout, ticket)
        self._copy_out(packed.words, read)

    def _plan_held(self, rows: ArrayI32, max_len: int) -> LogitsPlan:
        num = len(rows)
        return plan_logits(
            rows,
            np.arange(1, num + 1, dtype=np.int32),
            np.ones(num, np.int32),
            self._row_params,
            max_len=max_len,
            vocab_size=self.spec.vocab_size,
            slice_len=self._slice_len,
        )

    def _stage(self, arrays: HostArrays, buffer: Tensor | None = None) -> DeviceArrays:
        """The one copy of a step's host values. The slot is free again after the next event."""
        slot = self._staging.take(arrays.num_words)
        places = arrays.write(slot.words)
        words = self._device.stage(slot.front(arrays.num_words), buffer)
        self._staged.append(slot)
        return DeviceArrays(words, places)

    def _publish(self, plan: StepPlan, ticket: StepTicket, lens: Tensor) -> None:
        """Lengths after the step, int32 [rows], early."""
        self._copy_out(lens, functools.partial(self._read_lens, plan, ticket))

    def _copy_out(self, values: Tensor, read: Callable[[ArrayI32], Callable[[], None]]) -> None:
        """values: int32 [n]; `read` gets them once they are there, as a copy of its own."""
        num_words = len(values)
        slot = self._results.take(num_words)
        event = self._device.copy_out(values, slot.front(num_words))

        def land() -> Callable[[], None]:
            words = slot.words[:num_words].copy()
            self._results.give_back(slot)
            return read(words)

        self._land(event, land)

    def _land(self, event: Event, read: Callable[[], Job | None]) -> None:
        """After `event`, which what was staged so far stands before."""
        staged, self._staged = self._staged, []

        def land() -> Job | None:
            for slot in staged:
                self._staging.give_back(slot)
            return read()

        landing = Landing(event, land)
        if self._device.runs_behind:
            self._waiter.land(landing)
        else:
            # PERF: handing it to another thread costs two changes of the interpreter lock a step,
            # a third of the step of a tiny model (bench serve).
            self._waiter.finish(landing)

    # ------------------------------------------------------------ where landings are read

    def _read_lens(self, plan: StepPlan, ticket: StepTicket, words: ArrayI32) -> Job:
        lens = words[: len(plan.rows)]
        return functools.partial(ticket.publish, functools.partial(seq_lens, plan, lens))

    def _read_step(
        self, plan: StepPlan, layout: Layout, ticket: StepTicket, words: ArrayI32
    ) -> Job:
        num_words = sum(layout.sizes)
        found: Tokens | AserveError = read_tokens(
            words[:num_words], layout, plan.logits, plan.prompts
        )
        if self._is_debug:
            stamps, kv_lens = words[num_words:].reshape(2, -1)[:, : len(plan.rows)]
            found = check_step(plan, stamps, kv_lens) or found
        if isinstance(found, AserveError):
            return self._refuse(ticket, found)
        result = found.step_result(plan.iteration)
        if SEQ_LEN in self._runner.relay:
            return functools.partial(ticket.complete, result)
        return functools.partial(_complete_with_lens, ticket, result, plan)

    def _read_sample(
        self, logits: LogitsPlan, layout: Layout, ticket: StepTicket, words: ArrayI32
    ) -> Job:
        found = read_tokens(words, layout, logits)
        if isinstance(found, AserveError):
            return self._refuse(ticket, found)
        return functools.partial(ticket.complete, found.sample_result(ticket.iteration))

    def _refuse(self, ticket: StepTicket, error: AserveError) -> Job:
        """A result that is not sound fails its step, and every one after it up to the Resync."""
        self._invalid_at = ticket.iteration
        return functools.partial(ticket.complete, StepFailed(ticket.iteration, error.info()))

    def _ended(self, error: BaseException | None) -> None:
        """One of the two threads has ended, for whatever reason."""
        if self._is_closed and error is None:
            return
        reason = error or BugError("a device thread ended by itself")
        with contextlib.suppress(RuntimeError):  # the loop has ended, too
            self._loop.call_soon_threadsafe(self._report_death, reason)

    def _report_death(self, reason: BaseException) -> None:
        if not self.died.done():
            self.died.set_result(reason)


def _complete_with_lens(ticket: StepTicket, outcome: Outcome, plan: StepPlan) -> None:
    """The host knew the lengths all along."""
    ticket.publish(lambda: seq_lens(plan, plan.kv_lens + plan.query_lens))
    ticket.complete(outcome)


def _ends(plan: StepPlan) -> dict[int, int]:
    """Where each held row's history ends at most."""
    if not len(plan.held_rows):
        return {}
    held = np.isin(plan.rows, plan.held_rows)
    ends = (plan.kv_lens + plan.query_lens)[held]
    return {int(row): int(end) for row, end in zip(plan.held_rows, ends, strict=True)}
