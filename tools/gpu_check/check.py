"""Runs the parts of gpu-check, each in a process of its own, and keeps a record of each in a file.

A part that has a record is not run again, so a run can be interrupted and resumed. Without the
device, every part is reported as not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from aserve.bench.result import BenchResult, Table
from aserve.config import Resolved, set_environment
from aserve.errors import ConfigError
from tools.gpu_check.goals import judge_all
from tools.gpu_check.options import GpuCheckOptions
from tools.gpu_check.parts import Part, all_parts
from tools.gpu_check.process import Ended, run_process
from tools.gpu_check.records import Record, Records, Status
from tools.gpu_check.table import hosts_of, markdown
from tools.gpu_check.wheels import add_wheels
from tools.gpu_check.worker import Order

TABLE = "gpu-check.md"
MAX_ATTEMPTS = 2  # a part that crashes the machine is not tried for ever
AGAIN_ALL, AGAIN_FAILED = "all", "failed"


def run(options: GpuCheckOptions, _resolved: Resolved) -> BenchResult:
    out = Path(options.out)
    _set_path(options, out)
    check = Check(options, all_parts())
    kept = check.run_all()
    check.records.merge(kept)
    verdicts = judge_all(kept)
    (out / TABLE).write_text(markdown(verdicts, kept), encoding="utf-8")
    measures = [[one.measure.about, one.measure.goal, one.value, one.text] for one in verdicts]
    tables = (
        Table(
            "parts", ("part", "status", "seconds", "reason"), [_row(one) for one in kept.values()]
        ),
        Table("measures", ("measure", "goal", "value", "verdict"), measures),
    )
    figures = {
        "parts": {record.part: record.status for record in kept.values()},
        "measures": {one.measure.about: [one.value, one.text] for one in verdicts},
    }
    notes = (
        *hosts_of(kept),
        f"{check.records.merged} has all figures, and {out / TABLE} has the table",
    )
    return BenchResult(figures, tables, notes)


def _set_path(options: GpuCheckOptions, out: Path) -> None:
    """Lets the processes of the parts import this checkout and the packages from wheels."""
    if options.wheels is not None:
        try:
            add_wheels(Path(options.wheels), out)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"--wheels {options.wheels}: {error}") from None
    path = [str(Path(entry).resolve()) for entry in sys.path if entry]
    set_environment("PYTHONPATH", os.pathsep.join(path), wins=True)


class Check:
    """Runs the parts. `found` has the record of each part that has one; only `run_all`
    writes it.
    """

    def __init__(self, options: GpuCheckOptions, parts: Mapping[str, Part]) -> None:
        self.records = Records(Path(options.out))
        self.found = self.records.read()
        self._options = options
        self._parts = parts
        self._end_s = time.monotonic() + options.time_limit
        self._console = Console(stderr=True)
        for record in self.found.values():
            if (record.device, record.shape) != (options.device, options.shape):
                raise ConfigError(
                    f"--out {options.out} has results of --device {record.device} --shape "
                    f"{record.shape}: give another directory, or remove it"
                )

    def run_all(self) -> dict[str, Record]:
        """Runs the chosen parts, and returns all records in the order of the catalog."""
        chosen = _named(self._options.parts, self._parts, flag="--parts")
        for name in chosen or self._parts:
            if not self._is_kept(name):
                record = self.found[name] = self._run(name)
                self.records.write(record)
                self._console.print(_line(record), highlight=False, markup=False)
        return {name: self.found[name] for name in self._parts if name in self.found}

    def _is_kept(self, name: str) -> bool:
        record = self.found.get(name)
        again = self._options.again
        if record is None or again == AGAIN_ALL:
            return False
        if again == AGAIN_FAILED:
            return record.status == "done"
        return record.is_final and name not in _named(again, self._parts, flag="--again")

    def _run(self, name: str) -> Record:
        part = self._parts[name]
        before = self.found.get(name)
        attempt = 1
        if before is not None and before.status == "running":
            attempt = before.attempt + 1
        if before is not None and attempt > MAX_ATTEMPTS:
            reason = f"gpu-check ended while this part ran, {before.attempt} times"
            return msgspec.structs.replace(before, status="killed", reason=reason)
        options = self._options
        order = Order(
            out=options.out,
            part=name,
            module=part.module,
            argument=part.argument,
            device=options.device,
            shape=options.shape,
            attempt=attempt,
        )
        begun = _record(order)
        if reason := self._obstacle(part):
            return msgspec.structs.replace(begun, status="not run", reason=reason)
        self.records.write(begun)
        return self._after(order, run_process(order, self.records.log(name), part.limit_s))

    def _obstacle(self, part: Part) -> str:
        """Returns why the part cannot run here and now, or an empty text."""
        device = self._options.device
        if device == "cuda" and not torch.cuda.is_available():
            return "torch finds no GPU on this machine"
        if part.needs_gpu and device != "cuda":
            return "it needs a GPU"
        if device == "cuda" and (found := torch.cuda.device_count()) < part.num_gpus:
            return f"it needs {part.num_gpus} GPUs, and torch finds {found}"
        if missing := part.missing():
            return f"{missing} is not installed, nor among the wheels"
        if time.monotonic() + part.limit_s > self._end_s:
            return f"it may take {part.limit_s:.0f} s, more than --time-limit leaves"
        return ""

    def _after(self, order: Order, ended: Ended) -> Record:
        """Returns the record that the part wrote, or how its process ended if that was not
        normal.
        """
        record = self.records.read()[order.part]
        if ended.is_well and record.status != "running":
            return record
        reason = ended.reason or "it ended without a result"
        status: Status = "killed" if ended.is_killed else "failed"
        return msgspec.structs.replace(record, status=status, reason=reason, took_s=ended.took_s)


def _record(order: Order) -> Record:
    return Record(
        part=order.part,
        status="running",
        device=order.device,
        shape=order.shape,
        attempt=order.attempt,
    )


def _named(names: str | None, parts: Mapping[str, Part], *, flag: str) -> list[str]:
    """Returns the parts with these names. `tests` means all parts whose names begin with it."""
    chosen = []
    for word in names.split(",") if names else ():
        matching = [name for name in parts if name == word or name.startswith(f"{word}-")]
        if not matching:
            raise ConfigError(f"{flag} {word}: no part; there are {', '.join(parts)}")
        chosen += matching
    return chosen


def _row(record: Record) -> list[str]:
    return [record.part, record.status, f"{record.took_s:.0f}", record.reason]


def _line(record: Record) -> str:
    return f"{record.part}: {record.status} ({record.took_s:.0f} s) {record.reason}"
