"""Runs one part in this process, and writes its figures to its record as they come.

If it fails, the parent sees its exit code.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from pathlib import Path

import msgspec

from aserve.host.environment import prepare_process
from tools.gpu_check.host import read_host
from tools.gpu_check.records import Figures, Record, Records, Status
from tools.gpu_check.setting import Setting

NOT_RUN = "not_run"  # a figure with the reason why a bench cannot run here


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """The order of the parent process, as one JSON argument."""

    out: str
    part: str
    module: str
    argument: str
    device: str
    shape: str
    attempt: int


def main(argument: str) -> None:
    order = msgspec.json.decode(argument, type=Order)
    prepare_process(None)
    begin_s = time.perf_counter()
    records = Records(Path(order.out))
    record = Record(
        part=order.part,
        status="running",
        device=order.device,
        shape=order.shape,
        attempt=order.attempt,
        host=read_host(),
    )

    def keep(figures: Figures, status: Status = "running", reason: str = "") -> None:
        took_s = round(time.perf_counter() - begin_s, 1)
        records.write(
            msgspec.structs.replace(
                record, status=status, reason=reason, figures=figures, took_s=took_s
            )
        )

    keep({})
    setting = Setting(order.device, order.shape, Path(order.out) / "models", keep)
    figures = importlib.import_module(order.module).measure(setting, order.argument)
    if reason := figures.get(NOT_RUN):
        keep({}, "not run", str(reason))
    else:
        keep(figures, "done")


if __name__ == "__main__":
    main(sys.argv[1])
