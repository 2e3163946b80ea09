"""How far loading is, for whoever started it: a bar on a terminal, else a log line now and then.

Must not know what is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.console import Console
from rich.progress import Progress

OnProgress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all

PROGRESS_S = 5.0

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def shown_progress(what: str) -> Iterator[OnProgress]:
    """A bar on a terminal, else a log line every few seconds."""
    if not sys.stderr.isatty():
        yield _LoggedProgress(what)
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _LoggedProgress:
    def __init__(self, what: str) -> None:
        self._what = what
        self._next_line_at_s = time.monotonic() + PROGRESS_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next_line_at_s:
            self._next_line_at_s = now + PROGRESS_S
            logger.info("%s percent=%d", self._what, 100 * done // max(total, 1))
