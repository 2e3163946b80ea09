"""Pictures of what `scaling` found, one SVG per curve, one line per result.

It measures nothing: a picture shows figures that a file has.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from aserve.bench.chart import CURVES, Curve, line_chart
from aserve.bench.machine import Machine
from aserve.bench.options import ReportOptions
from aserve.bench.result import BenchResult, Table
from aserve.config import Resolved
from aserve.errors import ConfigError


class Scaling(msgspec.Struct):
    """As much of `scaling`'s last line as is drawn."""

    curves: dict[str, Curve]
    machine: Machine


def run(options: ReportOptions, _resolved: Resolved) -> BenchResult:
    results = [_read(Path(name)) for name in options.results.split(",")]
    labels = _labels(options, results)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, axes in CURVES.items():
        pairs = zip(labels, results, strict=True)
        series = {label: one.curves[name] for label, one in pairs if one.curves.get(name)}
        if series:
            path = out / f"{name}.svg"
            path.write_text(line_chart(axes, series), encoding="utf-8")
            pictures[name] = str(path)
    rows = [[CURVES[name].title, path] for name, path in pictures.items()]
    return BenchResult({"pictures": pictures}, (Table("pictures", ("curve", "file"), rows),))


def _read(path: Path) -> Scaling:
    """The file is the output of the bench, or its last line alone."""
    try:
        lines = path.read_bytes().splitlines()
        return msgspec.json.decode(lines[-1], type=Scaling)
    except (OSError, IndexError, msgspec.DecodeError) as error:
        raise ConfigError(f"--results {path}: not the output of bench scaling: {error}") from None


def _labels(options: ReportOptions, results: list[Scaling]) -> list[str]:
    if options.labels is None:
        return [f"{one.machine.cpu}, {one.machine.date[:10]}" for one in results]
    labels = options.labels.split(",")
    if len(labels) != len(results):
        raise ConfigError(f"--labels {options.labels}: {len(labels)} for {len(results)} results")
    return labels
