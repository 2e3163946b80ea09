"""A child process that has a socket as its stdin: how it starts, how it has ended, and how often it
may be started again.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from asyncio import timeout
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from aserve.host.threads import in_thread

ROOT = Path(__file__).parents[2]  # where `aserve` lies: nothing of the user's is imported instead
SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
WINDOW_S = 60.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 5.0


def spawn(command: Sequence[str], stdin: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a process with the ending signals blocked.

    WHY: a terminal sends Ctrl-C, and a service manager SIGTERM, to all processes, but the parent
    alone decides when each of them ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(command, stdin=stdin.fileno(), cwd=ROOT)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def exit_code(process: subprocess.Popen[bytes], *, timeout_s: float) -> int | None:
    """Returns None if the process has not ended in time."""
    with contextlib.suppress(TimeoutError):
        async with timeout(timeout_s):
            return await in_thread(process.wait, name="wait")
    return None


def describe(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class Restarts:
    """Decides whether a process that has died is started again. `most` is the number of restarts
    within WINDOW_S.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._deaths_s: deque[float] = deque()  # within the window

    def delay_s(self, now_s: float) -> float | None:
        """Notes a death. Returns how long to wait before the restart, or None for no restart. The
        first restart waits for nothing, and each further one within the window twice as long.
        """
        while self._deaths_s and self._deaths_s[0] < now_s - WINDOW_S:
            self._deaths_s.popleft()
        num_before = len(self._deaths_s)
        if num_before >= self.most:
            return None
        self._deaths_s.append(now_s)
        doubled = FIRST_DELAY_S * 2 ** min(num_before - 1, 10)
        return min(doubled, LONGEST_DELAY_S) if num_before else 0.0
