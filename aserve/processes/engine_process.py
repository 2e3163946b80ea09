"""The process of an engine: how it is started, started again, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aserve.host.threads import in_thread
from aserve.processes.link import Start

ENGINE = (sys.executable, "-m", "aserve.processes.engine")
END_S = 5.0  # for a process's last step, its memory and its exit; afterwards it is killed
DEATH_S = 1.0  # from a socket's end to the exit code; afterwards the process is killed
ROOT = Path(__file__).parents[2]  # where `aserve` lies: nothing of the user's is imported instead
SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
STABLE_S = 60.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 5.0


class EngineProcess:
    """The child process of an engine, and its successors. `command` starts one, whose stdin is the
    socket to its frontend.
    """

    def __init__(self, command: Sequence[str], start: Start, *, max_restarts: int = 0) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._start = start
        self._restarts = Restarts(max_restarts)
        self._num_starts = 0
        self._up_at_s = math.inf

    @property
    def limit(self) -> str:
        """Says, behind the cause of a death, why no other engine is started."""
        most = self._restarts.most
        return f" (it died more than {most} times in a row)" if most else ""

    def spawn(self) -> tuple[socket.socket, Start]:
        """Starts a process. Returns the socket to it, and the first message that it must get."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = spawned(self._command, theirs)
        start = numbered(self._start, self._num_starts)
        self._num_starts += 1
        self._up_at_s = math.inf
        return ours, start

    def note_up(self) -> None:
        """The present process is ready."""
        self._up_at_s = time.monotonic()

    async def bury(self) -> str:
        """Waits for the end of a process that has closed its socket, and says how it ended."""
        assert self.process is not None
        code = await ended(self.process, timeout_s=DEATH_S)
        return "closed its socket" if code is None else describe(code)

    def restart_delay_s(self) -> float | None:
        """Notes a death. Returns how long to wait for the next `spawn`, or None for no more."""
        return self._restarts.delay_s(up_s=time.monotonic() - self._up_at_s)

    async def close(self, *, was_up: bool) -> None:
        """Ends a loaded engine in order, within END_S; kills one that has not loaded yet."""
        if self.process is None:
            return
        if not was_up:
            self.process.kill()
        await ended(self.process, timeout_s=END_S)


async def ended(process: subprocess.Popen[bytes], *, timeout_s: float) -> int | None:
    """Waits for the end of a process, and kills it after `timeout_s`; then it returns None."""
    code = await exit_code(process, timeout_s=timeout_s)
    if code is None:
        process.kill()
        await in_thread(process.wait, name="wait")
    return code


def numbered(start: Start, num_starts: int) -> Start:
    """Returns the Start of an engine. What --record has written of a dead one is kept."""
    if not num_starts:
        return start
    resolved, debug = start.resolved, start.resolved.debug
    if debug.record is not None:
        debug = dataclasses.replace(debug, record=f"{debug.record}.{num_starts}")
        resolved = dataclasses.replace(resolved, debug=debug)
    return msgspec.structs.replace(start, resolved=resolved, is_restart=True)


def spawned(command: Sequence[str], stdin: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a process with the ending signals blocked.

    WHY: a terminal sends Ctrl-C, and a service manager SIGTERM, to all processes, but the parent
    alone decides when each of them ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(command, stdin=stdin.fileno(), cwd=ROOT)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def socket_of_stdin() -> socket.socket:
    """Returns the socket that `spawned` gave to this process. Stdin is /dev/null afterwards."""
    sock = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return sock


async def exit_code(process: subprocess.Popen[bytes], *, timeout_s: float) -> int | None:
    """Returns None if the process has not ended in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await in_thread(process.wait, name="wait")
    return None


def describe(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class Restarts:
    """Decides whether a process that has died is started again. `most` is the number of restarts in
    a row. A process that was up for STABLE_S begins a new row.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._num_in_row = 0

    def delay_s(self, *, up_s: float) -> float | None:
        """Notes the death of a process that was up for `up_s` seconds. Returns how long to wait
        before the restart, or None for no restart. The first restart of a row waits for nothing,
        and each further one twice as long.
        """
        num_before = 0 if up_s >= STABLE_S else self._num_in_row
        if num_before >= self.most:
            return None
        self._num_in_row = num_before + 1
        doubled = FIRST_DELAY_S * 2 ** min(num_before - 1, 10)
        return min(doubled, LONGEST_DELAY_S) if num_before else 0.0
