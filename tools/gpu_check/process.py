"""Runs the process of one part, measures its time, and kills it with its children after the limit.

Its output goes to a log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.gpu_check.worker import Order


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a part's process. `reason` is empty after a normal end."""

    took_s: float
    reason: str = ""
    is_killed: bool = False

    @property
    def is_well(self) -> bool:
        return not self.reason


def run_process(order: Order, log: Path, limit_s: float) -> Ended:
    """Runs the part. NOTE: it has a process group of its own, so its children end with it."""
    command = (sys.executable, "-m", "tools.gpu_check.worker", msgspec.json.encode(order))
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            _end_group(process)
    if code is None:
        reason = f"killed: it had not ended after {limit_s:.0f} s; its last line: {_last(log)}"
        return Ended(limit_s, reason, is_killed=True)
    took_s = round(time.monotonic() - begin_s, 1)
    if code < 0:
        name = signal.Signals(-code).name
        return Ended(took_s, f"killed by {name}; its last line: {_last(log)}", is_killed=True)
    return Ended(took_s, _last(log) or f"exit code {code}" if code else "")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]
