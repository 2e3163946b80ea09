"""The process of one part: run, timed, and killed with all that it started when its time is up.

It knows no part. What the process says goes to a log; how it ended is told in a few words.
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
    """How a part's process ended; all is well without a reason."""

    took_s: float
    reason: str = ""
    is_killed: bool = False

    @property
    def is_well(self) -> bool:
        return not self.reason


def run_process(order: Order, log: Path, limit_s: float) -> Ended:
    """NOTE: a group of its own, so that what the part has started ends with it."""
    command = (sys.executable, "-m", "tools.gpu_check.worker", msgspec.json.encode(order))
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Ended(limit_s, f"killed: it had not ended after {limit_s:.0f} s", is_killed=True)
        finally:
            _end_group(process)
    took_s = round(time.monotonic() - begin_s, 1)
    if code < 0:
        name = signal.Signals(-code).name
        return Ended(took_s, f"killed by {name}; its last words: {_last(log)}", is_killed=True)
    return Ended(took_s, _last(log) or f"exit code {code}" if code else "")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]
