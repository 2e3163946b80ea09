"""A progress bar for work that takes more than a moment: on a terminal, on stderr, gone at the end.

It does not know what the work is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def tracked(items: Sequence[T], what: str) -> Iterator[T]:
    yield from track(
        items,
        description=what,
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
