"""`TorchExecutor`: the thread that runs steps on the device, in launch order, on one stream."""

# Theory of operation
#
# Threads. The event loop's thread calls `launch`, `sample` and `resync`, which put a job into a
# queue and return a ticket at once. The executor thread runs the jobs: it prepares each step and
# asks the device for the work, but does not wait for it. The waiter thread synchronises events,
# reads results, and completes tickets on the loop. A device that does not run behind (the CPU) has
# finished when the call returns, so there the executor thread does the waiter's work itself.
# Attributes that two threads use are written by one of them, which `__init__` names.
#
# One step, in this order (step/__init__.py lists the forms that the data takes):
#
#   plan     ScheduleBatch -> StepPlan, numpy on the host
#   stage    the plan's arrays into one pinned slot, and from there in one copy to the device
#   apply    writes row tables and page tables for new requests and new pages
#   resolve  replaces placeholders and bounds from the relay, and writes the token pool
#   mode     forward, sample or verify, publish, draft, stash (decode/)
#   copy out the packed result into a pinned slot, followed by an event
#
# If the step has the shape of a captured graph, its plan is padded to that shape, the one copy goes
# to the buffer that the graph reads, and one replay stands for apply, resolve and mode. `Sample` is
# the mode's part from sampling on, for rows whose logits were held until their mask was ready.
#
# Buffers. A staging slot is given back by the first landing whose event lies behind its copy; a
# result slot when its words were read. Neither is touched in between.
#
# Failures (step_threads.py). Any exception of a step is the failure of that step: its ticket
# completes with StepFailed, and the thread goes on. The state on the device is then unknown, so
# every later step and Sample fails as well, until `Resync(iteration)` says that the scheduler has
# dropped everything in flight and that its next steps initialise their rows anew. A step can also
# fail late: the waiter finds NaN logits, or a failed debug check, in its result. Later steps have
# been launched by then. The waiter stores the iteration in `_invalid_at`, and the executor thread
# compares it with the last Resync's iteration, `_good_from`: a failure of before that Resync, which
# arrives late, is ignored. A device that has become unusable raises again when it is asked for the
# event of the failure: then the thread ends, `died` tells the engine, and the engine restarts.
#
# Exact lengths. With speculation the scheduler knows only bounds of some KV lengths. If attention
# plans on the host (`host_lens`), the executor thread waits for the lengths that the previous step
# published, and replaces the bounds before it plans. This is the only wait in this thread.

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from aserve.errors import AserveError, ErrorInfo
from aserve.gpu.cudagraph.graphs import Launched, StepGraphs
from aserve.gpu.cudagraph.warmup import run_padding_steps
from aserve.gpu.device.base import Device, Event, slice_len_of
from aserve.gpu.disagg.kv_access import TorchKvAccess
from aserve.gpu.live_loader import LiveLoader
from aserve.gpu.parallel.joint import JointForward
from aserve.gpu.parallel.staged_drafts import UNWATCHED, StepWatch, TurnDevice
from aserve.gpu.runner import ModelRunner
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.held import HeldSample, read_drafts
from aserve.gpu.step.plan import LogitsPlan, StepPlan
from aserve.gpu.step.repeated import StepPlanner
from aserve.gpu.step.results import Layout, check_step, read_sample, read_step, seq_lens
from aserve.gpu.step.ticket import Outcome, StepTicket
from aserve.gpu.step_threads import Job, StepThreads
from aserve.gpu.transfer.host_copy import HostCopy, PublishedLens
from aserve.gpu.transfer.pinned import PinnedSlot, PinnedSlots
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.gpu.waiter import Landing
from aserve.messages.base import ArrayI32, array_i32, num_values
from aserve.messages.changes import EngineJob
from aserve.messages.executor import EngineSpec
from aserve.messages.results import SeqLens, StepResult
from aserve.messages.step import Resync, Sample, ScheduleBatch


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    runner: ModelRunner
    device: Device
    spec: EngineSpec
    graphs: StepGraphs
    is_debug: bool
    about: str  # device, dtype, attention and graphs, for the log
    live_loader: LiveLoader
    needs_host_lens: bool = False  # attention plans on the host, from exact lengths
    joint: JointForward | None = None  # of data-parallel ranks
    watch: StepWatch = UNWATCHED
    is_first: bool = True  # the scheduler has the results of this rank, or there is only one


class TorchExecutor:
    """Implements messages.Executor. Public methods are called on the event loop's thread."""

    def __init__(self, parts: ExecutorParts) -> None:
        self.spec, self.about = parts.spec, parts.about
        self._runner = parts.runner
        self._live_loader = parts.live_loader
        self._device = parts.device
        self._graphs = parts.graphs
        self._is_debug = parts.is_debug
        # NOTE: the scheduler has results of steps whose drafts another rank may still compute.
        self._writes_here = parts.is_first and not parts.device.runs_behind
        self._joint = parts.joint
        self._watch = parts.watch
        self._slice_len = slice_len_of(parts.device, vocab_size=parts.spec.vocab_size)
        self._row_params = RowParams(parts.spec.max_rows)
        self._planner = StepPlanner(
            self._row_params, vocab_size=parts.spec.vocab_size, slice_len=self._slice_len
        )
        self._published = PublishedLens() if parts.needs_host_lens else None
        self._read_s = 0.0  # when the last result came; written where results are read
        self._staging = PinnedSlots(parts.device, is_debug=parts.is_debug)
        self._staged: list[PinnedSlot] = []  # since the last event; written by the executor thread
        self._results = PinnedSlots(parts.device, is_debug=parts.is_debug)
        self._turn_device = TurnDevice(self._stage, self._await_device)
        self._threads = StepThreads(self._run, land_after_all=self._land_after_all)

    # ------------------------------------------------------------ the event loop's thread

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.died = self._threads.start(loop)

    def capture_graphs(self, on_progress: Callable[[int, int], None]) -> None:
        """Captures every graph of the shape table, before `start`, on the calling thread."""
        with torch.inference_mode(), self._device.stream():
            self._graphs.capture_all(on_progress)

    async def warm_up(self) -> None:
        await run_padding_steps(
            lambda batch: self.launch(*[batch] * self.spec.dp_size),
            self.died,
            num_groups=len(self.spec.groups),
        )

    def launch(self, *batches: ScheduleBatch) -> StepTicket:
        """NOTE: a step that fails, or is refused because an earlier one has failed, still takes
        its part in the forward of all ranks, so that no other rank waits for it.
        """
        joint = self._joint
        if joint is None:
            [batch] = batches  # this executor is one rank
            self._watch.note_launch(batch)
            return self._threads.launch(batch.iteration, functools.partial(self._step, batch))
        batch = batches[joint.rank]
        counts = tuple(num_values(each.input_ids) for each in batches)
        self._threads.jobs.put(functools.partial(joint.begin, counts))
        work = functools.partial(self._step if batch.rows else self._stay_idle, batch)
        ticket = self._threads.launch(batch.iteration, work)
        self._threads.jobs.put(joint.finish)
        return ticket

    def sample(self, sample: Sample) -> StepTicket:
        return self._threads.launch(sample.iteration, functools.partial(self._sample, sample))

    def resync(self, resync: Resync) -> None:
        self._threads.resync(resync.iteration, self._forget)

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        """Does it between two steps, or returns the reason why not."""
        return await self._live_loader.run(job, submit=self._threads.jobs.put, died=self.died)

    def kv_access(self) -> TorchKvAccess:
        state, submit = self._runner.state, self._threads.jobs.put
        return TorchKvAccess(state, self._device, submit, writes_here=self._writes_here)

    def close(self) -> None:
        """Runs what was launched to its end, then ends both threads."""
        self._threads.close()

    # ------------------------------------------------------------ the executor thread

    def _run(self) -> None:
        with torch.inference_mode(), self._device.stream():
            while (job := self._next()) is not None:
                job()

    def _next(self) -> Job | None:
        """Returns the next job. Graphs are captured while there is none, so a new job waits for at
        most one capture; ranks capture together, before the next job.
        """
        while self._graphs.is_due(is_idle=self._threads.jobs.empty()):
            self._graphs.capture_next()
        return self._threads.jobs.get()

    def _forget(self) -> None:
        self._runner.held.clear()
        if self._published is not None:
            self._published.clear()

    def _step(self, batch: ScheduleBatch, ticket: StepTicket) -> None:
        start_s = time.perf_counter()
        self._watch.begin(batch, self._turn_device)
        self._row_params.write(batch.row_inits)
        self._runner.state.kv_streams.begin(batch.iteration)
        self._runner.state.checkpoints.read(batch)
        plan = self._planner.plan(batch)
        self._runner.held.forget(plan.rows)
        if self._published is not None and not plan.is_exact:
            exact = self._published.exact(plan.rows, plan.kv_lens, plan.is_bound)
            plan = plan.with_exact_lens(exact)
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
        self._runner.state.checkpoints.write(batch)
        launched = Launched(start_s, self._graphs.ran(graph))
        read = functools.partial(self._read_step, plan, packed.layout, ticket, launched)
        self._copy_out(packed.words, read)

    def _stay_idle(self, batch: ScheduleBatch, ticket: StepTicket) -> None:
        """Runs a batch without rows, which touches neither tables nor relay."""
        ticket.publish(lambda: SeqLens(batch.iteration, b"", b""))
        result = StepResult(batch.iteration, b"", b"", b"")
        self._land_after_all(functools.partial(ticket.complete, result))

    def _sample(self, sample: Sample, ticket: StepTicket) -> None:
        rows = array_i32(sample.rows)
        held = self._runner.held.take(sample.iteration, rows)
        plan = held.plan_sample(
            rows, self._row_params, vocab_size=self.spec.vocab_size, slice_len=self._slice_len
        )
        arrays = HostArrays()
        plan.stage(arrays)
        arrays.add("kept", held.kept(rows))
        arrays.add("mask", array_i32(sample.masks))
        publish = functools.partial(self._publish, plan, ticket)
        packed = self._runner.finish_held(HeldSample(plan, self._stage(arrays), held), publish)
        read = functools.partial(self._read_sample, plan.logits, packed.layout, ticket)
        self._copy_out(packed.words, read)

    def _stage(self, arrays: HostArrays, buffer: Tensor | None = None) -> DeviceArrays:
        """Copies a step's host values to the device, in one copy. The slot is given back after the
        next event."""
        slot = self._staging.take(arrays.num_words)
        places = arrays.write(slot.words)
        words = self._device.stage(slot.prefix(arrays.num_words), buffer)
        self._staged.append(slot)
        return DeviceArrays(words, places)

    def _await_device(self) -> None:
        self._device.mark().synchronize()

    def _publish(self, plan: StepPlan, ticket: StepTicket, lens: Tensor) -> None:
        """lens: int32 [rows], KV lengths after the step. Called while the step still runs."""
        copy = self._copy_out(lens, functools.partial(self._read_lens, plan, ticket))
        if self._published is not None:
            self._published.note(plan.rows, copy)

    def _copy_out(self, values: Tensor, read: Callable[[ArrayI32], Callable[[], None]]) -> HostCopy:
        """Copies values, int32 [n], to the host. `read` is called with them when they are there."""
        # PERF: `len` of a tensor is a call of Python.
        slot = self._results.take(num_words := values.numel())
        event = self._device.copy_out(values, slot.prefix(num_words))
        copy = HostCopy(self._results, slot, num_words, event)
        self._land(event, lambda: read(copy.read()))
        return copy

    def _land_after_all(self, complete: Job) -> None:
        self._land(self._device.mark(), lambda: complete)

    def _land(self, event: Event, read: Callable[[], Job]) -> None:
        """Calls `read` after `event`, and gives back the slots that were staged before it."""
        staged, self._staged = self._staged, []

        def land() -> Job:
            for slot in staged:
                self._staging.give_back(slot)
            return read()

        landing = Landing(event, land)
        if self._device.runs_behind:
            self._threads.waiter.land(landing)
        else:
            # PERF: handing it to another thread costs two switches of the interpreter lock per
            # step, a third of the step of a tiny model (bench serve).
            self._threads.waiter.finish(landing)

    # ------------------------------------------------------------ the waiter thread

    def _read_lens(self, plan: StepPlan, ticket: StepTicket, words: ArrayI32) -> Job:
        lens = words[: len(plan.rows)]
        return functools.partial(ticket.publish, functools.partial(seq_lens, plan, lens))

    def _read_step(
        self, plan: StepPlan, layout: Layout, ticket: StepTicket, at: Launched, words: ArrayI32
    ) -> Job:
        start_s, self._read_s = max(at.start_s, self._read_s), time.perf_counter()
        num_words = sum(layout.sizes)
        result = read_step(words[:num_words], layout, plan.logits, plan.prompts, plan.iteration)
        if self._is_debug:
            stamps, kv_lens = words[num_words:].reshape(2, -1)[:, : len(plan.rows)]
            result = check_step(plan, stamps, kv_lens) or result
        if isinstance(result, AserveError):
            return self._threads.refuse(ticket, result)
        drafts, took_us = read_drafts(words, layout, plan), (self._read_s - start_s) * 1e6
        result = msgspec.structs.replace(result, drafts=drafts, took_us=took_us, ran=at.ran)
        return functools.partial(_complete_with_lens, ticket, result, plan)

    def _read_sample(
        self, logits: LogitsPlan, layout: Layout, ticket: StepTicket, words: ArrayI32
    ) -> Job:
        result = read_sample(words, layout, logits, ticket.iteration)
        if isinstance(result, AserveError):
            return self._threads.refuse(ticket, result)
        return functools.partial(ticket.complete, result)


def _complete_with_lens(ticket: StepTicket, outcome: Outcome, plan: StepPlan) -> None:
    """Publishes the lengths of a step that has not, because the host knows them."""
    ticket.publish(lambda: seq_lens(plan, plan.kv_lens + plan.query_lens))
    ticket.complete(outcome)
