"""Reads the files of a checkpoint ahead, while a model is built from them.

The files are memory-mapped, and a model is built layer by layer. Without help, one thread would
read them in small pieces, and the disk would be idle while a layer is prepared. Threads advise the
kernel to read the files into its page cache, several slices at a time. A checkpoint that would not
stay in memory is not read ahead, because its pages would be dropped and read again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from aserve.host.limits import available_memory_bytes

NUM_THREADS = 4
SLICE_BYTES = 64 << 20  # what one thread reads before it takes the next slice
PIECE_BYTES = 128 << 10  # of one advice: Linux reads so much, and may read no more


class ReadAhead:
    """A context manager, within which the files are read. Whoever leaves it need not wait."""

    __slots__ = ("_is_over", "_paths", "_threads")

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read-ahead")

    def __enter__(self) -> None:
        sizes = [path.stat().st_size for path in self._paths]
        if not hasattr(os, "posix_fadvise") or sum(sizes) > available_memory_bytes() // 2:
            return
        for path, size in zip(self._paths, sizes, strict=True):
            for start in range(0, size, SLICE_BYTES):
                self._threads.submit(self._read, path, start, min(start + SLICE_BYTES, size))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._threads.shutdown(cancel_futures=True)

    def _read(self, path: Path, start: int, stop: int) -> None:
        with path.open("rb") as file:
            for offset in range(start, stop, PIECE_BYTES):
                if self._is_over.is_set():
                    return
                size = min(PIECE_BYTES, stop - offset)
                os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)
