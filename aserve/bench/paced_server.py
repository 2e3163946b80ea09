"""`aserve serve` on a device whose steps take longer: `python -m aserve.bench.paced_server MS ...`.

A step computes on the CPU, and then sleeps without the interpreter lock. So most of its time is
that of a device which no other process of this machine slows down, as a GPU would be.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from aserve.cli import ARGUMENTS, make_parser
from aserve.config import Facts, Resolved, read_raw, resolve
from aserve.gpu.build import build_on
from aserve.gpu.device.base import Event
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.executor import TorchExecutor
from aserve.host.logs import start_logging
from aserve.host.memory import collect_rarely
from aserve.host.threads import new_event_loop
from aserve.load import build_options, load
from aserve.progress import OnStage
from aserve.server import Server
from aserve.startup import InThisProcess
from aserve.tiny import MODEL_DIR


class PacedDevice(CpuDevice):
    """A CPU that sleeps before it copies the results of a step to the host."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__(f"each step sleeps {1e3 * sleep_s:g} ms")
        self._sleep_s = sleep_s
        self._never = threading.Event()

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        self._never.wait(self._sleep_s)
        return super().copy_out(values, host)


def run(sleep_s: float, arguments: Sequence[str]) -> int:
    known = vars(make_parser({}).parse_args(["serve", *arguments]))
    given = {name: value for name, value in known.items() if name not in ARGUMENTS}
    resolved = resolve(read_raw(given), Facts(default_model=str(MODEL_DIR)))
    start_logging(resolved.debug.log_level or "info", resolved.debug.log_format)
    collect_rarely()

    def load_paced(resolved: Resolved, model_dir: Path, _on_stage: OnStage) -> TorchExecutor:
        return build_on(PacedDevice(sleep_s), build_options(resolved, model_dir))

    loader = functools.partial(load, executors={resolved.machine.device: load_paced})
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(Server(resolved, InThisProcess(loader)).run())


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]) / 1e3, sys.argv[2:]))
