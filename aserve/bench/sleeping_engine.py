"""An engine's process whose device only sleeps: `python -m aserve.bench.sleeping_engine SETTINGS`.

It is the server's own but for the executor. Must not know what is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from aserve.bench.sleeping_device import SleepingExecutor
from aserve.messages import EngineSpec
from aserve.processes.engine import main


class Settings(msgspec.Struct, frozen=True):
    """As JSON on the command line; `naps_path` is where the naps are written at the end."""

    spec: EngineSpec
    step_s: float
    naps_path: str


def command(settings: Settings) -> tuple[str, ...]:
    text = msgspec.json.encode(settings).decode()
    return (sys.executable, "-m", "aserve.bench.sleeping_engine", text)


def run(settings: Settings) -> int:
    executor = SleepingExecutor(settings.spec, step_s=settings.step_s)
    code = main(lambda _: executor)
    Path(settings.naps_path).write_bytes(msgspec.json.encode(executor.naps))
    return code


if __name__ == "__main__":
    sys.exit(run(msgspec.json.decode(sys.argv[1], type=Settings)))
