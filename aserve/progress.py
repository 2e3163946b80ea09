"""Shows how far a long task is: a bar on a terminal, else a log line every few seconds."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.console import Console
from rich.progress import Progress

OnProgress: TypeAlias = Callable[[int, int], None]  # how much is done, and how much there is
OnStage: TypeAlias = Callable[[str, int, int], None]  # a stage of the start, with its progress

PROGRESS_S = 5.0

logger = logging.getLogger(__name__)


def ignore_stage(_stage: str, _done: int, _total: int) -> None:
    pass


@contextlib.contextmanager
def shown_progress(what: str) -> Iterator[OnProgress]:
    """Yields the function that moves the bar or logs. Any thread may call it."""
    if not sys.stderr.isatty():
        yield _LoggedProgress(what)
        return
    bar = _Bar(what)
    try:
        yield bar
    finally:
        bar.stop()


class _Bar:
    """Appears with the first call, so that an earlier task can have a bar of its own."""

    def __init__(self, what: str) -> None:
        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        self._progress.start()
        self._progress.update(self._task, completed=done, total=total)

    def stop(self) -> None:
        self._progress.stop()


class _LoggedProgress:
    def __init__(self, what: str) -> None:
        self._what = what
        self._next_line_at_s = time.monotonic() + PROGRESS_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next_line_at_s:
            self._next_line_at_s = now + PROGRESS_S
            logger.info("%s percent=%d", self._what, 100 * done // max(total, 1))
