"""The pool of compile workers: a thread takes one for a job and puts it back.

Several threads call it, and shared state is written under the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from aserve.errors import Cancelled, ShuttingDown
from aserve.grammar.compile import Compiler, Vocabulary
from aserve.grammar.process import CompileProcess
from aserve.grammar.worker import Setup
from aserve.messages.requests import Grammar

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar


IDLE_S = 300.0  # a worker that is not needed for so long ends
USABLE_S = IDLE_S - 10  # one that was idle for longer may end while a job is on its way


@dataclass(frozen=True, slots=True)
class CompileLimits:
    timeout_s: float  # for one grammar
    memory_bytes: int  # for one grammar, beyond what a worker has once it is ready
    num_workers: int


@dataclass(frozen=True, slots=True)
class Usable:
    """A compiled grammar, and whether its masks were slow when the worker tried it out."""

    compiled: CompiledGrammar
    is_slow: bool

    @property
    def memory_size_bytes(self) -> int:
        return self.compiled.memory_size_bytes


class CompileJob:
    """One grammar that is being compiled. Its fields are written under the lock of `Workers`."""

    __slots__ = ("grammar", "is_cancelled", "worker")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.worker: CompileProcess | None = None  # while it compiles
        self.is_cancelled = False


class Workers:
    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        limits: CompileLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_vocabulary = vocabulary
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()  # held for seconds, while libraries are imported
        self._known: tuple[Setup, Compiler] | None = None
        self._all: set[CompileProcess] = set()
        self._idle: dict[CompileProcess, float] = {}  # since when, the latest last
        self._is_closed = False

    def adopt(self, worker: CompileProcess) -> None:
        """Takes over a worker that was started before, which then stays, and returns once it is
        ready."""
        with self._lock:
            self._check_open()
            self._all.add(worker)
        setup, _ = self._vocabulary()
        try:
            worker.get_ready(msgspec.structs.replace(setup, idle_s=0))
        finally:
            self._put_back(worker)

    def compile(self, job: CompileJob) -> Usable:
        """Blocks until the grammar is compiled. Raises the AserveError that it failed with."""
        setup, compiler = self._vocabulary()
        job.worker = worker = self._take()
        try:
            worker.get_ready(setup)
            if job.is_cancelled:
                raise Cancelled("nobody waits for this grammar any more")
            done = worker.try_out(job.grammar)
        finally:
            with self._lock:
                job.worker = None
            self._put_back(worker)
        return Usable(compiler.compile(job.grammar), done.is_slow)

    def cancel(self, job: CompileJob) -> None:
        """Ends the compilation of this job if it has begun. Its worker takes another job."""
        with self._lock:
            job.is_cancelled = True
            if job.worker is not None:
                job.worker.interrupt()

    def close(self) -> None:
        """Ends all worker processes. A thread that waits for one gets ShuttingDown."""
        with self._lock:
            self._is_closed = True
            left = list(self._all)
        for worker in left:
            worker.close()

    def _vocabulary(self) -> tuple[Setup, Compiler]:
        with self._vocabulary_lock:
            if self._known is None:
                vocabulary = self._make_vocabulary()
                limits = self._limits
                setup = Setup(vocabulary, limits.timeout_s, limits.memory_bytes, IDLE_S)
                self._known = setup, Compiler(vocabulary)
            return self._known

    def _take(self) -> CompileProcess:
        with self._lock:
            self._check_open()
            while self._idle:
                idle, since_s = self._idle.popitem()
                is_fresh = idle.stays or self._clock() - since_s < USABLE_S
                if idle.is_alive and is_fresh:
                    return idle
                self._end(idle)
            worker = CompileProcess()
            self._all.add(worker)
            return worker

    def _check_open(self) -> None:
        if self._is_closed:
            raise ShuttingDown("the server compiles no more grammars")

    def _put_back(self, worker: CompileProcess) -> None:
        with self._lock:
            if worker.is_alive:
                self._idle[worker] = self._clock()
            else:
                self._end(worker)

    def _end(self, worker: CompileProcess) -> None:
        self._all.discard(worker)
        worker.close()
