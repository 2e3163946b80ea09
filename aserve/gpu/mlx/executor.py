"""`MlxExecutor`: runs steps on MLX, two graphs in flight.

The executor thread builds the graph of a step and hands it to MLX, which computes it on a stream of
its own (`mx.async_eval`). The waiter thread waits for the packed result and completes the ticket.
So while MLX computes step N, the executor thread builds step N + 1, whose input is the lazy token
of step N (runner.py). How far this goes is the scheduler's decision (`depth`, `lead`), as it is for
torch.

Failures are those of gpu/executor.py: a step that raises, or whose result is invalid, fails, and so
does every later one until the Resync. An error while MLX computes is none of a step: arrays that
depend on it can never be computed, so the waiter's thread ends, and the engine restarts.

An array is waited for by one thread only: the packed results by the waiter thread, all that later
steps read by the executor thread. MLX does not lock arrays. The thread that has waited drops the
array's event, and another one that still waits for it may then do so for ever.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from aserve.errors import AserveError, ErrorInfo, InvalidRequest
from aserve.gpu.cudagraph.warmup import run_padding_steps
from aserve.gpu.mlx.arrays import to_host
from aserve.gpu.mlx.runner import Graph, MlxRunner
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import LogitsPlan, StepPlan
from aserve.gpu.step.repeated import StepPlanner
from aserve.gpu.step.results import Layout, read_sample, read_step, seq_lens
from aserve.gpu.step.ticket import StepTicket
from aserve.gpu.step_threads import Job, StepThreads
from aserve.gpu.waiter import Landing
from aserve.messages.base import ArrayI32
from aserve.messages.changes import EngineJob
from aserve.messages.executor import EngineSpec
from aserve.messages.step import Resync, Sample, ScheduleBatch

LOGITS_ELEMENTS = 1 << 24  # of the logits that are computed at a time


@dataclass(frozen=True, slots=True)
class _Computed:
    """The event of an array that MLX computes, and that no other thread waits for."""

    array: mx.array

    def synchronize(self) -> None:
        mx.eval(self.array)


class MlxExecutor:
    """Implements messages.Executor. Public methods are called on the event loop's thread."""

    def __init__(self, runner: MlxRunner, spec: EngineSpec, *, about: str) -> None:
        self.spec = spec
        self.about = about
        self._runner = runner
        self._row_params = RowParams(spec.max_rows)
        self._slice_len = max(1, LOGITS_ELEMENTS // spec.vocab_size)
        self._planner = StepPlanner(
            self._row_params, vocab_size=spec.vocab_size, slice_len=self._slice_len
        )
        self._last: tuple[mx.array, ...] = ()  # what later steps read of the last one
        self._threads = StepThreads(self._run, land_after_all=self._land_after_all)

    # ------------------------------------------------------------ the event loop's thread

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.died = self._threads.start(loop)

    async def warm_up(self) -> None:
        await run_padding_steps(self.launch, self.died, num_groups=len(self.spec.groups))

    def launch(self, *batches: ScheduleBatch) -> StepTicket:
        [batch] = batches  # this executor is one rank
        return self._threads.launch(batch.iteration, functools.partial(self._step, batch))

    def sample(self, sample: Sample) -> StepTicket:
        return self._threads.launch(sample.iteration, functools.partial(self._sample, sample))

    def resync(self, resync: Resync) -> None:
        self._threads.resync(resync.iteration, self._runner.forget_held)

    async def run_job(self, job: EngineJob) -> ErrorInfo | None:
        """Refuses every job: adapters, new weights and torch's profiler are for torch devices."""
        kind = type(job).__name__
        return InvalidRequest(f"{kind} is not supported with --device mlx").info()

    def close(self) -> None:
        """Runs what was launched to its end, then ends both threads."""
        self._threads.close()

    # ------------------------------------------------------------ the executor thread

    def _run(self) -> None:
        while (job := self._threads.jobs.get()) is not None:
            job()

    def _land_after_all(self, complete: Job) -> None:
        behind = sum((array.reshape(-1)[:1].sum() for array in self._last), mx.zeros(()))
        mx.async_eval(behind)  # raises again if MLX cannot compute them; this thread ends then
        self._threads.waiter.land(Landing(_Computed(behind), lambda: complete))

    def _step(self, batch: ScheduleBatch, ticket: StepTicket) -> None:
        self._row_params.write(batch.row_inits)
        plan = self._planner.plan(batch)
        self._runner.apply(batch)
        graph = self._runner.step(plan, wait=lambda: mx.eval(*self._last))
        self._compute(graph, functools.partial(self._read_step, plan, graph.layout, ticket))

    def _sample(self, sample: Sample, ticket: StepTicket) -> None:
        graph = self._runner.sample(sample, self._row_params, slice_len=self._slice_len)
        read = functools.partial(self._read_sample, graph.logits, graph.layout, ticket)
        self._compute(graph, read)

    def _compute(self, graph: Graph, read: Callable[[ArrayI32], Job]) -> None:
        """Begins to compute a graph, and does not wait for it."""
        self._last, words = graph.arrays, graph.words
        mx.async_eval(words, *self._last)
        self._threads.waiter.land(Landing(_Computed(words), lambda: read(to_host(words))))

    # ------------------------------------------------------------ the waiter thread

    def _read_step(
        self, plan: StepPlan, layout: Layout, ticket: StepTicket, words: ArrayI32
    ) -> Job:
        result = read_step(words, layout, plan.logits, plan.prompts, plan.iteration)
        if isinstance(result, AserveError):
            return self._threads.refuse(ticket, result)

        def complete() -> None:
            ticket.publish(lambda: seq_lens(plan, plan.kv_lens + plan.query_lens))
            ticket.complete(result)

        return complete

    def _read_sample(
        self, logits: LogitsPlan, layout: Layout, ticket: StepTicket, words: ArrayI32
    ) -> Job:
        result = read_sample(words, layout, logits, ticket.iteration)
        if isinstance(result, AserveError):
            return self._threads.refuse(ticket, result)
        return functools.partial(ticket.complete, result)
