"""The ways by which the bytes of blocks travel: behind each Block, or through shared memory.

The prefill side lays out a block in its arena, and the decode side copies it into memory of its own
before it looks at the checksum. So a slot that is used again too early, because one side has given
the transfer up, makes a checksum wrong, and no answer.
"""

from __future__ import annotations

import threading
import zlib
from typing import Protocol

import numpy as np

from aserve.disagg.arena import Arena, open_shared
from aserve.disagg.wire import (
    Block,
    Carrier,
    Choice,
    Connection,
    Offers,
    SharedPlace,
    Taken,
    TransferError,
    TransferRefused,
)

MAX_BLOCK_BYTES = 256 << 20
MAX_UNTAKEN = 8  # slots that one transfer fills ahead of its peer

# ------------------------------------------------------------ the prefill side


class Outlet:
    """Sends the blocks of one transfer. Used by the thread of its connection."""

    def __init__(self, connection: Connection, arena: Arena | None) -> None:
        """`arena` is None if the bytes follow their blocks."""
        self._connection = connection
        self._arena = arena
        self._untaken: list[int] = []

    def send(self, first: int, num_tokens: int, values: memoryview) -> None:
        """The bytes follow also if no slot is free, or none is large enough."""
        offset = self._slot(len(values))
        block = Block(first, num_tokens, len(values), zlib.crc32(values), offset)
        if offset is None or self._arena is None:
            self._connection.send_values(block, values)
            return
        self._arena.memory[offset : offset + len(values)] = values
        self._connection.send(block)

    def end(self) -> None:
        """Waits until the peer has all bytes."""
        while self._untaken:
            self._await_taken()

    def close(self) -> None:
        """Gives back all slots."""
        for offset in self._untaken:
            assert self._arena is not None
            self._arena.give_back(offset)
        self._untaken = []

    def _slot(self, num_bytes: int) -> int | None:
        if self._arena is None or num_bytes > self._arena.slot_bytes:
            return None
        while len(self._untaken) >= MAX_UNTAKEN:
            self._await_taken()
        offset = self._arena.take()
        if offset is not None:
            self._untaken.append(offset)
        return offset

    def _await_taken(self) -> None:
        message = self._connection.receive()
        if not isinstance(message, Taken) or self._arena is None:
            raise TransferError(f"the peer says {message}, but it has blocks to take")
        self._arena.give_back(self._untaken.pop(0))


def agree(connection: Connection, offers: Offers) -> Carrier:
    """Offers carriers to the peer, and returns the one that it takes."""
    connection.send(offers)
    choice = connection.receive()
    if not isinstance(choice, Choice):
        raise TransferError(f"a carrier is chosen by a Choice, not by {choice}")
    is_offered = offers.is_inline if choice.carrier == "tcp" else offers.shared is not None
    if not is_offered:
        raise TransferError(f"the peer takes the carrier {choice.carrier}, which was not offered")
    return choice.carrier


# ------------------------------------------------------------ the decode side


class Inlet(Protocol):
    """Brings the bytes of the blocks of one transfer. Used by the thread of its connection."""

    carrier: Carrier

    def fill(self, offset: int, values: memoryview) -> None:
        """Copies what lies at an offset of the peer's memory."""


class InlineInlet:
    carrier: Carrier = "tcp"

    def fill(self, offset: int, values: memoryview) -> None:
        raise TransferError("a block in shared memory, but its bytes should follow")


class SharedInlet:
    carrier: Carrier = "shm"

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def fill(self, offset: int, values: memoryview) -> None:
        if not 0 <= offset <= len(self._memory) - len(values):
            raise TransferError(
                f"a block of {len(values)} bytes at {offset}, but the shared memory has "
                f"{len(self._memory)}"
            )
        values[:] = self._memory[offset : offset + len(values)]


class Inlets:
    """Opens what prefill engines offer. Any thread may call it."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._shared: dict[bytes, memoryview] = {}  # of peers, by token

    def choose(self, offers: Offers) -> Inlet:
        """Raises TransferRefused if nothing that is offered may be used, or can be."""
        if self._backend in ("auto", "shm") and offers.shared is not None:
            try:
                return SharedInlet(self._memory(offers.shared))
            except OSError as error:
                if self._backend == "shm":
                    reason = f"its memory cannot be shared: {error}"
                    raise TransferRefused(
                        f"--disaggregation-transfer-backend shm: {reason}"
                    ) from None
        if self._backend in ("auto", "tcp") and offers.is_inline:
            return InlineInlet()
        raise TransferRefused(
            f"--disaggregation-transfer-backend {self._backend}: the prefill engine has another one"
        )

    def forget(self) -> None:
        """Called when a transfer has broken off: a mapping keeps the memory of a dead process."""
        with self._lock:
            self._shared = {}

    def _memory(self, place: SharedPlace) -> memoryview:
        with self._lock:
            if place.token not in self._shared:
                self._shared[place.token] = open_shared(place)
            return self._shared[place.token]


def receive_values(connection: Connection, inlet: Inlet, block: Block) -> memoryview:
    """Returns the bytes of a block. Raises TransferError if they are not those that were sent."""
    if block.num_bytes > MAX_BLOCK_BYTES:
        raise TransferError(f"a block of {block.num_bytes} bytes: at most {MAX_BLOCK_BYTES}")
    values: memoryview = np.empty(block.num_bytes, np.uint8).data  # not zeroed first
    if block.offset is None:
        connection.fill(values)
    else:
        inlet.fill(block.offset, values)
        connection.send(Taken())
    if (found := zlib.crc32(values)) != block.checksum:
        raise TransferError(f"the checksum of a block is {found:#x}, not {block.checksum:#x}")
    return values
