"""The server's handle of one compile worker process, which takes one job at a time.

Its calls block, and one thread at a time may use it; only `interrupt` and `close` may be called
from another thread. The pipes are used and closed under a lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from aserve.errors import BugError, CapacityError, InvalidRequest, ShuttingDown
from aserve.frames import receive, send
from aserve.grammar.compile import Done, Failed
from aserve.grammar.worker import KILLED, Job, Ready, Reply, Setup
from aserve.messages.requests import Grammar

T = TypeVar("T")

MODULE = "aserve.grammar.worker"
ROOT = Path(__file__).parents[2]  # where `aserve` lies: it need not be installed


@contextlib.contextmanager
def early_worker(num_workers: int) -> Iterator[CompileProcess | None]:
    """Starts a worker for a server that has any. It is ended if the server fails to start."""
    if not num_workers:
        yield None
        return
    with contextlib.ExitStack() as undo:
        worker = CompileProcess()
        undo.callback(worker.close)
        yield worker
        undo.pop_all()


class CompileProcess:
    """Starts the process, which imports its libraries at once. `get_ready` waits for them."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is for the server; and it leads its forks
            )
        except OSError as error:
            raise CapacityError(f"a grammar worker cannot be started: {error}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs = self._process.stdin
        self._replies = self._process.stdout
        self._setup: Setup | None = None  # once it is ready
        self._turn = threading.Lock()  # of the pipes
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def stays(self) -> bool:
        """Whether it never ends for having no job."""
        return self._setup is not None and not self._setup.idle_s

    def get_ready(self, setup: Setup) -> None:
        """Waits for the worker's imports, which take seconds."""
        if self._setup is not None:
            return
        if self._ask(setup, Ready) is None:
            raise CapacityError(f"a grammar worker ended at its start: {self._ended()}")
        self._setup = setup

    def try_out(self, grammar: Grammar) -> Done:
        """Lets the worker compile a grammar. Raises the ClientError of one that is invalid or over
        a limit. The worker is ready.
        """
        reply = self._ask(Job(grammar), Reply)
        if reply is None:
            result = self._failure()
        elif isinstance(reply.result, Done):
            return reply.result
        else:
            result = reply.result
        raise InvalidRequest(
            f"Invalid '{grammar.param}': {result.message}.", param=grammar.param, code=result.code
        )

    def interrupt(self) -> None:
        """Ends the compilation that runs. Call it from another thread."""
        if self.is_alive:
            self._process.send_signal(signal.SIGUSR1)

    def close(self) -> int:
        """Ends the worker and its fork and returns the exit code. A waiting caller gets
        end-of-file.
        """
        self._is_closed = True
        if self.is_alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._turn, contextlib.suppress(BrokenPipeError), self._process:
            pass  # closes the pipes and waits
        return self._process.returncode

    def _ask(self, message: Setup | Job, kind: type[T]) -> T | None:
        """Returns None if the process has ended."""
        with self._turn:
            if self._is_closed:
                return None
            with contextlib.suppress(BrokenPipeError):
                send(self._jobs, message)
            return receive(self._replies, kind)

    def _failure(self) -> Failed:
        """Returns why there is no reply. Raises BugError if the grammar did not cause it."""
        ended = self._ended()
        if ended == -signal.SIGKILL:
            return Failed("grammar_out_of_memory", KILLED)
        raise BugError(f"a grammar worker has ended with exit code {ended}")

    def _ended(self) -> int:
        """Returns the exit code of a process that has ended by itself."""
        if self._is_closed:
            raise ShuttingDown("the server compiles no more grammars")
        self._process.wait()
        return self.close()
