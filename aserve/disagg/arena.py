"""Memory of one process in which it lays out blocks for peers, and that a peer can map.

The memory has no name. Another process of the same machine opens it by the numbers of the process
and of the file, and believes that it is the right one only if the random token of the offer stands
in it. The kernel frees it when the last of the two processes is gone, however they end. It is
sealed: its owner cannot make it smaller, so a peer that reads it gets no SIGBUS.
"""

from __future__ import annotations

import fcntl
import heapq
import mmap
import os
import secrets
import threading

import numpy as np

from aserve.disagg.wire import SharedPlace

HEAD_BYTES = 4096  # the token, and padding to a page
TOKEN_BYTES = 16
SLOT_BYTES = 4 << 20
NUM_SLOTS = 64  # taken from the lowest one on, so that those not needed never cost memory
SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


def can_share() -> bool:
    return hasattr(os, "memfd_create")


class Arena:
    """Slots of memory. Any thread may take and give back."""

    def __init__(self, *, slot_bytes: int = SLOT_BYTES, num_slots: int = NUM_SLOTS) -> None:
        self.slot_bytes = slot_bytes
        self._num_bytes = HEAD_BYTES + slot_bytes * num_slots
        self._free = [HEAD_BYTES + slot_bytes * number for number in range(num_slots)]
        self._lock = threading.Lock()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._file = _sealed_file(self._num_bytes) if can_share() else -1
        self.memory = memoryview(mmap.mmap(self._file, self._num_bytes))
        self.memory[:TOKEN_BYTES] = self._token

    @property
    def place(self) -> SharedPlace:
        """The place where a peer on this machine finds the memory."""
        return SharedPlace(os.getpid(), self._file, self._token, self._num_bytes)

    @property
    def address(self) -> int:
        return int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Returns the offset of a slot, or None if there is none."""
        with self._lock:
            return heapq.heappop(self._free) if self._free else None

    def give_back(self, offset: int) -> None:
        with self._lock:
            heapq.heappush(self._free, offset)

    def close(self) -> None:
        """The memory stays mapped as long as something in this process uses it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_shared(place: SharedPlace) -> memoryview:
    """Maps the memory of another process, to read it. Raises OSError if it is not there, which is
    so if that process runs on another machine.
    """
    path = f"/proc/{place.process}/fd/{place.file}"
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError(f"{path} can change its size")
        if os.fstat(file).st_size != place.num_bytes:
            raise OSError(f"{path} is another file")
        memory = memoryview(mmap.mmap(file, place.num_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(file)
    if not secrets.compare_digest(memory[:TOKEN_BYTES], place.token):
        raise OSError(f"{path} has another token")
    return memory


def _sealed_file(num_bytes: int) -> int:
    file = os.memfd_create("aserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, num_bytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file
