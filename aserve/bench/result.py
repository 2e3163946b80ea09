"""What a bench found: tables for people, and one JSON object for programs.

It does not know how a figure came about, and shows no figure of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table as RichTable

from aserve.bench.machine import Machine

WIDE = 160  # columns of a page that is no terminal: nothing is cut

Figures: TypeAlias = Mapping[str, object]  # what msgspec can write as JSON


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` hold texts as they are shown, one per column."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """`notes` say what a reader must know to compare: what was measured, and what was left out."""

    figures: Figures
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()


def show(name: str, result: BenchResult, machine: Machine) -> None:
    """The tables, then the machine, then as the last line of stdout the JSON object."""
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    for table in result.tables:
        shown = RichTable(title=table.title, title_justify="left")
        for number, column in enumerate(table.columns):
            shown.add_column(column.replace("_", " "), justify="left" if number == 0 else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for note in (*result.notes, str(machine)):
        console.print(note, highlight=False, markup=False)
    console.file.flush()
    line = {**result.figures, "bench": name, "machine": machine}
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
