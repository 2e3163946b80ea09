"""A process and all that it started, out of /proc. It does not know what they do. Linux only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def living(pid: int) -> Iterator[Path]:
    """The folders of those that live in /proc; a child belongs to the thread that started it."""
    waiting = [PROC / str(pid)]
    while waiting:
        process = waiting.pop()
        try:
            children = [(task / "children").read_text() for task in (process / "task").iterdir()]
        except OSError:
            continue  # it has ended meanwhile
        yield process
        waiting += [PROC / child for text in children for child in text.split()]
