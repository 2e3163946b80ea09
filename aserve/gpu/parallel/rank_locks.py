"""Tells ranks of one machine that another one has ended.

Each rank holds a lock on a file of its own, which the kernel frees when its process ends.
"""

from __future__ import annotations

import fcntl
import weakref
from collections.abc import Mapping
from io import FileIO

from aserve.parallel.topology import Coordinates


class RankLocks:
    """A locked file for each rank. A lock is that of an open file, so ranks may also be threads of
    one process, and it goes with the process or the object."""

    def __init__(self, place: Coordinates) -> None:
        self._rank = place.rank
        self._paths = [f"{place.store}.{n}" for n in range(place.num_ranks)]
        self._files = {place.rank: FileIO(self._paths[place.rank], "w")}
        fcntl.flock(self._files[place.rank], fcntl.LOCK_EX)
        weakref.finalize(self, _close, self._files)

    def watch(self) -> None:
        """Opens the files of the others, once all ranks have locked theirs."""
        for rank, path in enumerate(self._paths):
            if rank not in self._files:
                self._files[rank] = FileIO(path)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of the others' files, in the order of ranks; -1 for this rank."""
        ranks = range(len(self._paths))
        return [-1 if rank == self._rank else self._files[rank].fileno() for rank in ranks]

    def is_free(self, rank: int) -> bool:
        """Returns whether a rank that has met the others has ended."""
        if rank not in self._files:
            return False
        try:
            fcntl.flock(self._files[rank], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _close(files: Mapping[int, FileIO]) -> None:
    for file in files.values():
        file.close()
