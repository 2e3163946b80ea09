"""One compile worker, as the server sees it: started, given one job at a time, ended.

Must not know caches or requests. Its calls block, and belong to one thread at a time; only `close`
may come from another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

from aserve.errors import BugError, CapacityError, InvalidRequest
from aserve.frames import receive, send
from aserve.grammar.frames import Done, Job, Ready, Reply, Setup
from aserve.messages import Grammar

T = TypeVar("T")

MODULE = "aserve.grammar.worker"
ROOT = Path(__file__).parents[2]  # where `aserve` lies: it need not be installed


class CompileProcess:
    def __init__(self, setup: Setup) -> None:
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
        self._setup = setup
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def compile(self, grammar: Grammar) -> str:
        """xgrammar's JSON of it, or the ClientError of a grammar that is no good or too much.

        The first one waits for seconds of imports, too.
        """
        if not self._is_ready:
            self._ask(self._setup, Ready)
            self._is_ready = True
        result = self._ask(Job(grammar), Reply).result
        if isinstance(result, Done):
            return result.compiled
        raise InvalidRequest(
            f"Invalid '{grammar.param}': {result.message}.", param=grammar.param, code=result.code
        )

    def close(self) -> int:
        """Ends it and its fork: its exit code. Whoever waits for a reply meets the stream's end."""
        if self.is_alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), self._process:
            pass  # closes the pipes and waits
        return self._process.returncode

    def _ask(self, message: Setup | Job, kind: type[T]) -> T:
        with contextlib.suppress(BrokenPipeError):
            send(self._jobs, message)
        reply = receive(self._replies, kind)
        if reply is None:
            raise BugError(f"a grammar worker has ended with exit code {self.close()}")
        return reply
