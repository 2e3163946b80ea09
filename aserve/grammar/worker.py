"""A compile worker, `python -m aserve.grammar.worker`, with jobs on stdin and replies on stdout.

It imports xgrammar at once, while the server loads its model. The server sends one Setup, which the
worker answers with Ready; then each Job is answered by one Reply. A grammar may take any time and
memory, so each one compiles in a fork of this process, which the kernel ends at its limits. The
next grammar gets a fresh fork at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import signal
import sys
import warnings
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from aserve.frames import receive, send
from aserve.grammar.compile import Compiler, Done, Failed, Vocabulary
from aserve.messages.requests import Grammar

STARTUP_S = 120.0  # imports take seconds, on a busy machine many
BROKEN, OUT_OF_MEMORY = 1, 3  # exit codes of a fork
# The message for a worker that the kernel killed while it compiled.
KILLED = (
    "compiling it was ended by the system, which does that when memory runs out. Make it simpler, "
    "or give the server more memory"
)


class Setup(msgspec.Struct, frozen=True):
    vocabulary: Vocabulary
    timeout_s: float  # for one grammar
    memory_bytes: int  # for one grammar, beyond what the worker has when it is ready
    idle_s: float  # a worker that gets no job for so long ends; 0: it stays


class Ready(msgspec.Struct, frozen=True):
    pass


class Job(msgspec.Struct, frozen=True):
    grammar: Grammar


class Reply(msgspec.Struct, frozen=True):
    result: Done | Failed


def main() -> None:
    signal.signal(signal.SIGUSR1, _kill_fork)
    signal.setitimer(signal.ITIMER_REAL, STARTUP_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # NOTE: xgrammar starts no thread, and numpy's threads are safe to fork.
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    jobs, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that output of a library is not taken for a reply
    gc.disable()  # what is imported stays, and a fork ends with its grammar
    with contextlib.suppress(ImportError):  # the compiler says what that means
        importlib.import_module("xgrammar")
    setup = receive(jobs, Setup)
    if setup is None:
        return
    compiler = Compiler(setup.vocabulary)
    send(replies, Ready())
    while (job := _next_job(jobs, setup.idle_s)) is not None:
        _serve(job.grammar, replies, compiler=compiler, setup=setup)


def _next_job(jobs: IO[bytes], idle_s: float) -> Job | None:
    """Waits for a job; an alarm ends an idle process, which holds hundreds of megabytes."""
    signal.setitimer(signal.ITIMER_REAL, idle_s)
    job = receive(jobs, Job)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return job


def _kill_fork(*_: object) -> None:
    """Ends the compilation that runs, if there is one."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def _serve(grammar: Grammar, replies: IO[bytes], *, compiler: Compiler, setup: Setup) -> None:
    """Compiles in a fork, which replies itself unless a limit ends it before."""
    pid = os.fork()
    if pid == 0:
        _compile_in_fork(grammar, replies, compiler=compiler, setup=setup)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        send(replies, Reply(_exceeded_limit(code, setup)))


def _compile_in_fork(
    grammar: Grammar, replies: IO[bytes], *, compiler: Compiler, setup: Setup
) -> NoReturn:
    """NOTE: a fork has none of its parent's threads, so whatever happens it must not end as Python
    does, which may wait for them.
    """
    code = BROKEN
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, setup.timeout_s)
        Path("/proc/self/oom_score_adj").write_text("1000")  # ended before the server itself
        _limit_memory(setup.memory_bytes)
        result = compiler.try_out(grammar)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(replies, Reply(result))
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    finally:
        os._exit(code)


def _limit_memory(memory_bytes: int) -> None:
    """Limits memory beyond what the libraries have taken already, hundreds of megabytes."""
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = data_pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _exceeded_limit(code: int, setup: Setup) -> Failed:
    if code == -signal.SIGALRM:
        return Failed(
            "grammar_timeout",
            f"compiling it takes longer than {setup.timeout_s:g} seconds. Make it simpler, or "
            "start the server with a larger --grammar-timeout",
        )
    if code == OUT_OF_MEMORY:
        return Failed(
            "grammar_out_of_memory",
            f"compiling it takes more than {setup.memory_bytes >> 20} MiB. Make it simpler, or "
            "start the server with a larger --grammar-memory",
        )
    if code == -signal.SIGKILL:
        return Failed("grammar_out_of_memory", KILLED)
    return Failed("grammar_too_complex", f"the compiler broke on it, exit code {code}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the server has ended
        main()
    os._exit(0)  # Python's own end would wait for threads of libraries
