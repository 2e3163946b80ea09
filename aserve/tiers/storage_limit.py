"""`StorageLimit` keeps a folder of pages below a size: the least recently used files go first.

Several servers may have the same folder. Each trims it when it has written a part of the limit. A
file that another one deletes meanwhile is gone, which is all that was wanted. A reader that has
opened a file reads it to its end, and one that comes too late computes the page. Only files with
the names of pages are deleted, whatever else lies in the folder.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from aserve.host.threads import Worker

SHARE = 20  # a server trims the folder when it has written this part of the limit
KEPT = 0.9  # of the limit, after the folder was trimmed
PART_S = 3600.0  # after which the unfinished file of a server that was killed is deleted
PAGE = re.compile(r"[0-9a-f]{32}/[0-9a-f]{2}/([0-9a-f]+|[0-9a-f]{32}\.part)")

logger = logging.getLogger(__name__)


class StorageLimit:
    """`note` may be called by any thread. A thread of its own trims the folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._num_written = 0
        self._is_due = threading.Event()
        self._is_closed = False
        self._worker = Worker("kv-trim", self._work, on_end=_log_end)

    def start(self) -> None:
        """Trims the folder once, and then whenever enough was written."""
        self._is_due.set()
        self._worker.start()

    def note(self, num_bytes: int) -> None:
        self._num_written += num_bytes
        if self._num_written * SHARE >= self.max_bytes:
            self._num_written = 0
            self._is_due.set()

    def close(self) -> None:
        self._is_closed = True
        self._is_due.set()

    def _work(self) -> None:
        while self._is_due.wait() and not self._is_closed:
            self._is_due.clear()
            try:
                trim(self.folder, self.max_bytes)
            except OSError as error:
                logger.warning("--hicache-storage %s cannot be trimmed: %s", self.folder, error)


def trim(folder: Path, max_bytes: int) -> int:
    """Deletes what was not used for the longest time if the pages take more than `max_bytes`.
    Returns the bytes that are left. Raises OSError if the folder cannot be read.
    """
    files = sorted(_pages(folder))
    num_bytes = sum(size for _, size, _ in files)
    if num_bytes <= max_bytes:
        return num_bytes
    num_before, num_deleted = num_bytes, 0
    for _, size, path in files:
        if num_bytes <= KEPT * max_bytes:
            break
        with contextlib.suppress(FileNotFoundError):  # another server was faster
            path.unlink()
            num_deleted += 1
        num_bytes -= size
    logger.info(
        "--hicache-storage: %d files deleted, %d of %d bytes left",
        *(num_deleted, num_bytes, num_before),
    )
    return num_bytes


def _pages(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yields last use, size and path of each page. Deletes what killed servers left unfinished."""
    for path in folder.glob("*/*/*"):
        if not PAGE.fullmatch(path.relative_to(folder).as_posix()):
            continue
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if path.suffix != ".part":
                yield found.st_mtime, found.st_size, path
            elif found.st_mtime < time.time() - PART_S:
                path.unlink()


def _log_end(error: BaseException | None) -> None:
    if error is not None:
        logger.error("files of pages are not deleted any more: %r", error)
