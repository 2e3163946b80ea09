"""Summarizes repeats (median, percentile, spread) and prints results as tables and JSON."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable

from aserve.bench.machine import Machine


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least `percent` of the values do not exceed, or NaN."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> float:
    """Returns (largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


WIDE = 160  # columns if the output is not a terminal, so that no table is cut

Figures: TypeAlias = Mapping[str, object]  # what msgspec can write as JSON


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose rows have one text per column."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The figures, for JSON, and their tables. `notes` explain what was measured. A run that Ctrl-C
    has ended is not whole.
    """

    figures: Figures
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    is_whole: bool = True


def show(name: str, result: BenchResult, machine: Machine) -> None:
    """Prints the tables, the notes and the machine, and the figures as JSON in the last line."""
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    for table in result.tables:
        shown = RichTable(title=table.title, title_justify="left")
        for number, column in enumerate(table.columns):
            shown.add_column(column.replace("_", " "), justify="left" if number == 0 else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for note in (*result.notes, str(machine)):
        console.print(note, highlight=False, markup=False, emoji=False)
    console.file.flush()
    line = {**result.figures, "bench": name, "machine": machine}
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows a progress bar, and yields the function to call after each of the `total` parts."""
    shown = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with shown:
        task = shown.add_task(what, total=total)
        yield lambda: shown.advance(task)
