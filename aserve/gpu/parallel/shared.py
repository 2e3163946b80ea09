"""The collectives of ranks of one machine: each writes its part to memory that all of them map.

A collective takes one meeting (aserve_kernels/cpu/rendezvous.py). Each rank has two buffers that it
uses in turns. It writes to one of them again two collectives later, and by then all ranks have come
to the collective between, so they have read what it held. Longer tensors travel in pieces.

Ranks hear of a death at once (rank_locks.py). For a rank that lives and does not come they wait as
long as their `Patience` says.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.parallel.rank_locks import RankLocks
from aserve.parallel.topology import Coordinates, Patience, RankLost
from aserve_kernels.cpu import rank_sum
from aserve_kernels.cpu.rendezvous import FLAGS_PER_LINE, meet

BUFFER_BYTES = 1 << 19  # 128 rows of 1,024 elements in float32
LOOKS = 2_000  # at a flag before the core is given away, about 60 us
YIELD_S = 0.002  # for which a core is given away and taken back, before a rank sleeps between looks
SLEEP_S = 0.0002
DEATH_CHECK_S = 0.05


class SharedCollectives:
    """`Collectives` over shared memory. A rank that is lost ends the caller with RankLost.

    A compiled step sums by itself, between `begin` and `end`. It counts its collectives in the same
    words as this object, so that both may follow each other.
    """

    def __init__(self, place: Coordinates, patience: Patience) -> None:
        """Meets the other ranks. Raises ConfigError if there is no memory to share."""
        self.rank, self.num_ranks = place.rank, place.num_ranks
        self._patience = Patience(place.meet_s)
        self._words = np.zeros(rank_sum.FILES + self.num_ranks, np.int64)
        self._locks = RankLocks(place)
        memory = _shared_memory(Path(f"{place.store}.memory"), self._num_bytes)
        words = FLAGS_PER_LINE * self.num_ranks
        self._flags = np.frombuffer(memory, np.int64, words).reshape(-1, FLAGS_PER_LINE)
        shape = (2, self.num_ranks, BUFFER_BYTES)
        bytes_ = torch.frombuffer(memory, dtype=torch.uint8, offset=self._flags.nbytes)
        self._buffers = bytes_.view(shape)
        self._describe()
        self._meet()
        self._locks.watch()
        self._words[rank_sum.FILES :] = self._locks.descriptors
        self._patience = patience

    @property
    def address(self) -> int:
        """The address of the words of aserve_kernels/cpu/rank_sum.py, which this object keeps."""
        return int(self._words.ctypes.data)

    def begin(self) -> None:
        """A compiled step begins."""
        slept_us = rank_sum.SLEEP_US + rank_sum.TIMER_SLACK_US
        self._words[rank_sum.MAX_SLEEPS] = int(self._patience.seconds * 1e6 / slept_us)

    def end(self) -> None:
        """A compiled step has ended. Raises RankLost if it has lost a rank."""
        if self._words[rank_sum.LOST]:
            self._check(self._patience.seconds + 1, self._patience.seconds)
            raise RankLost(f"rank {self.rank} has lost another rank, which was late")

    @property
    def _number(self) -> int:
        """The collectives so far."""
        return int(self._words[rank_sum.NUMBER])

    @property
    def _num_bytes(self) -> int:
        return 8 * FLAGS_PER_LINE * self.num_ranks + 2 * self.num_ranks * BUFFER_BYTES

    def _describe(self) -> None:
        words = self._words
        words[[rank_sum.RANK, rank_sum.NUM_RANKS]] = self.rank, self.num_ranks
        words[rank_sum.FLAGS] = self._flags.ctypes.data
        words[rank_sum.BUFFERS] = self._buffers.data_ptr()
        words[rank_sum.BUFFER_BYTES] = BUFFER_BYTES

    def sum(self, x: Tensor) -> Tensor:
        parts = self._gather(x)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    def concat(self, x: Tensor) -> Tensor:
        return torch.cat(tuple(self._gather(x)), dim=-1)

    def least(self, number: int) -> int:
        return int(self._gather(torch.tensor([number], dtype=torch.int64)).min())

    def _gather(self, x: Tensor) -> Tensor:
        """Returns the ranks' tensors, [ranks, *x.shape], which hold until the next call."""
        own = x.contiguous().view(-1).view(torch.uint8)
        if len(own) <= BUFFER_BYTES:
            return self._exchange(own).view(x.dtype).view(self.num_ranks, *x.shape)
        every = x.new_empty((self.num_ranks, *x.shape))
        places = every.view(self.num_ranks, -1).view(torch.uint8)
        for start in range(0, len(own), BUFFER_BYTES):
            piece = slice(start, start + BUFFER_BYTES)
            places[:, piece] = self._exchange(own[piece])
        return every

    def _exchange(self, own: Tensor) -> Tensor:
        """own uint8 [n], at most BUFFER_BYTES -> a view of all ranks' bytes, uint8 [ranks, n]."""
        buffers = self._buffers[self._number & 1, :, : len(own)]
        buffers[self.rank].copy_(own)
        self._meet()
        return buffers

    def _meet(self) -> None:
        self._words[rank_sum.NUMBER] += 1
        if not meet(self._flags, self.rank, self._number, LOOKS):
            self._wait()

    def _wait(self) -> None:
        """Waits for ranks that are late. Raises RankLost."""
        limit_s = self._patience.seconds  # may be less when the late rank comes
        began_s = checked_s = time.monotonic()
        while not meet(self._flags, self.rank, self._number, LOOKS):
            now_s = time.monotonic()
            if now_s - began_s < YIELD_S:
                os.sched_yield()
                continue
            if now_s - checked_s > DEATH_CHECK_S:
                checked_s = now_s
                self._check(now_s - began_s, limit_s)
            # NOTE: memory tells nobody that it was written, so there is no event to wait for.
            threading.Event().wait(SLEEP_S)

    def _check(self, waited_s: float, limit_s: float) -> None:
        late = [rank for rank, flag in enumerate(self._flags[:, 0]) if flag < self._number]
        for rank in late:
            if self._locks.is_free(rank):
                raise RankLost(f"rank {self.rank} has lost rank {rank}, which has ended")
        if late and waited_s > limit_s:
            raise RankLost(
                f"rank {self.rank} has lost rank {late[0]}, which did not come to a collective in "
                f"{limit_s:.0f} s"
            )


def _shared_memory(path: Path, num_bytes: int) -> mmap.mmap:
    """Maps a file of zeros, which the first rank that comes makes. Its memory is reserved, because
    memory that is missing later would end the process."""
    with _opened(path) as fd:
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            return mmap.mmap(fd, num_bytes)
        except OSError as error:
            raise ConfigError(
                f"the ranks need {num_bytes >> 20} MiB of shared memory in {path.parent}: {error}",
                param="tensor_parallel_size",
            ) from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
