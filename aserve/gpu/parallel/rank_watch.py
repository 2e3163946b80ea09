"""Ends the waits of a thread for its device, where the device waits for a rank that was lost."""

# Theory of operation
#
# A collective on the CPU runs in the thread that calls it, and raises RankLost by itself. NCCL's
# collectives are kernels: the call returns at once, and the kernel spins on the device until all
# ranks have come. If one of them has ended, or hangs, the kernel never ends, and neither does the
# wait of a thread for its event. A replayed graph has no Python code that could look at a clock.
#
# So each rank has a thread that looks at its waits, four times a second. The ranks are lost if a
# rank of this machine has ended (rank_locks.py) while this one waits for its device, or if a wait
# takes longer than `Patience` says, and DEVICE_S for the step itself. Then it does three things:
#
#   1. `Patience.lost` completes. The executor of rank 0 dies of it, and so the engine; any other
#      rank ends its process. This does not depend on the device.
#   2. `abort` ends the kernels of the communicator (ncclCommAbort), so the device goes on.
#   3. The wait that comes back by that raises RankLost, as collectives on the CPU do.
#
# Kernels that exchange through each other's memory without NCCL know no abort. A thread that waits
# for them is left behind, and its process ends without it: rank 0 kills the other ranks, an engine
# process ends by os._exit, and the driver frees the device with the process.
#
# torch's own watchdog would end the process of rank 0 with all of its streams, and does not see
# replayed collectives, so it is switched off (nccl.py).
#
# Altogether a rank that ends is noticed after at most CHECK_S, and mostly before by its socket. One
# that hangs is noticed after 5 + DEVICE_S seconds while the engine serves.

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from aserve.gpu.parallel.rank_locks import RankLocks
from aserve.host.threads import Worker
from aserve.parallel.topology import Coordinates, Patience, RankLost

CHECK_S = 0.25
DEVICE_S = 3.0  # for the longest step on the device alone


class RankWatch:
    """Written by the threads that wait, each its own entry, and by the watching one."""

    def __init__(self, place: Coordinates, patience: Patience, abort: Callable[[], None]) -> None:
        self._place = place
        self._patience = patience
        self._abort = abort
        self._locks = None if place.cluster is not None else RankLocks(place)
        self._waits: dict[int, tuple[float, float]] = {}  # their ends and seconds, by thread
        self._reason = ""
        self._ended = threading.Event()
        weakref.finalize(self, self._ended.set)

    def start(self) -> None:
        """Call it when all ranks have made theirs."""
        if self._locks is not None:
            self._locks.watch()
        body = functools.partial(_watch, weakref.ref(self), self._ended)
        Worker("aserve-ranks", body, on_end=lambda _: None).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it, the calling thread waits for the device. Raises RankLost at its end."""
        thread = threading.get_ident()
        limit_s = self._patience.seconds + DEVICE_S
        self._waits[thread] = time.monotonic() + limit_s, limit_s
        try:
            yield
        except RuntimeError as error:  # of a device whose collectives were aborted
            self._raise_lost(error)
            raise
        finally:
            del self._waits[thread]
        self._raise_lost(None)

    def look(self) -> bool:
        """Returns whether the ranks are lost, and ends what waits for them."""
        self._reason = self._reason or self._found()
        if not self._reason:
            return False
        self._patience.end(self._reason)
        self._abort()
        return True

    def _found(self) -> str:
        waits = list(self._waits.values())
        if not waits:
            return ""
        own, locks = self._place.rank, self._locks
        for rank in range(self._place.num_ranks):
            if locks is not None and rank != own and locks.is_free(rank):
                return f"rank {own} has lost rank {rank}, which has ended"
        end_s, limit_s = min(waits)
        if time.monotonic() < end_s:
            return ""
        return (
            f"rank {own} has lost another rank: its device has not ended a step in {limit_s:.0f} s"
        )

    def _raise_lost(self, error: RuntimeError | None) -> None:
        if self._reason:
            raise RankLost(self._reason) from error


def _watch(found: weakref.ref[RankWatch], ended: threading.Event) -> None:
    while not ended.wait(CHECK_S):
        watch = found()
        if watch is None or watch.look():
            return
        del watch
