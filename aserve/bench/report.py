"""`aserve bench report` draws charts of measurements that are stored in files.

It draws one SVG for each curve of `scaling`, with one line per result, or one bar chart for a
comparison of engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from aserve.bench.chart import CURVES, Comparison, Curve, bar_chart, line_chart
from aserve.bench.machine import Machine
from aserve.bench.options import ReportOptions
from aserve.bench.result import BenchResult, Table
from aserve.config import Resolved
from aserve.errors import ConfigError


class Scaling(msgspec.Struct):
    """The fields of the last line of `scaling` that the charts need."""

    curves: dict[str, Curve]
    machine: Machine


def run(options: ReportOptions, _resolved: Resolved) -> BenchResult:
    drawn = dict(_drawn(options))
    out = Path(options.out)
    pictures = {name: str(out / f"{name}.svg") for name in drawn}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, picture in drawn.items():
            Path(pictures[name]).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    rows = [[name, path] for name, path in pictures.items()]
    return BenchResult({"pictures": pictures}, (Table("pictures", ("picture", "file"), rows),))


def _drawn(options: ReportOptions) -> Iterator[tuple[str, str]]:
    """Yields the name and the SVG document of each picture."""
    if options.comparison is not None:
        path = Path(options.comparison)
        yield path.stem, bar_chart(_read_comparison(path))
        return
    results = [_read_scaling(Path(name)) for name in options.results.split(",")]
    labels = _labels(options, results)
    for name, axes in CURVES.items():
        pairs = zip(labels, results, strict=True)
        series = {label: one.curves[name] for label, one in pairs if one.curves.get(name)}
        if series:
            yield name, line_chart(axes, series)


def _read_comparison(path: Path) -> Comparison:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Comparison)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--comparison {path}: not a comparison of engines: {error}") from None


def _read_scaling(path: Path) -> Scaling:
    """Reads the output of the benchmark, or only its last line."""
    try:
        lines = path.read_bytes().splitlines()
        return msgspec.json.decode(lines[-1] if lines else b"", type=Scaling)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--results {path}: not the output of bench scaling: {error}") from None


def _labels(options: ReportOptions, results: list[Scaling]) -> list[str]:
    if options.labels is None:
        return [f"{one.machine.cpu}, {one.machine.date[:10]}" for one in results]
    labels = options.labels.split(",")
    if len(labels) != len(results):
        raise ConfigError(
            f"--labels {options.labels}: got {len(labels)} labels for {len(results)} results"
        )
    return labels
