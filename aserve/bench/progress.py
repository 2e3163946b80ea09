"""A progress bar for work that takes more than a moment: on a terminal, on stderr, gone at the end.

It does not know what the work is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """What to call after each of the `total` parts."""
    shown = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with shown:
        task = shown.add_task(what, total=total)
        yield lambda: shown.advance(task)
