"""The transports by which the bytes of blocks travel: behind each Block, through memory that both
sides map, or read by NIXL.

The prefill side lays out a block in its arena, and the decode side copies it into memory of its own
before it looks at the checksum. So a slot that is used again too early, because one side has given
the transfer up, makes a checksum wrong, and no answer.
"""

from __future__ import annotations

import threading
import zlib
from typing import Protocol

import numpy as np

from aserve.disagg.arena import Arena, can_share, open_shared
from aserve.disagg.nixl_agent import NixlAgent
from aserve.disagg.wire import (
    Block,
    Choice,
    Connection,
    NixlPlace,
    Offers,
    SharedPlace,
    Taken,
    TransferError,
    TransferRefused,
    Transport,
)

MAX_BLOCK_BYTES = 256 << 20
WORDS = 512  # of 8 bytes, in a row of a checksum
ROW_BYTES = 8 * WORDS
MAX_UNTAKEN = 8  # slots that one transfer fills ahead of its peer

# ------------------------------------------------------------ the prefill side


class BlockSender:
    """Sends the blocks of one transfer. Used by the thread of its connection."""

    def __init__(
        self, connection: Connection, arena: Arena | None, transport: Transport = "tcp"
    ) -> None:
        """`arena` is None if the bytes follow their blocks."""
        self.transport = transport
        self._connection = connection
        self._arena = arena
        self._untaken: list[int] = []

    def send(self, tokens: range, layers: range, values: memoryview) -> None:
        """The bytes follow also if no slot is free, or none is large enough."""
        offset = self._slot(len(values))
        block = Block(
            *(tokens.start, len(tokens), len(values), layers.start, len(layers)),
            checksum=checksum(values),
            offset=offset,
        )
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


class BlockSenders:
    """The transports of a prefill engine, and the memory in which it lays out blocks."""

    def __init__(self, backend: str) -> None:
        """`backend` is --disaggregation-transfer-backend. Raises ConfigError if there is none."""
        is_shared = backend in ("auto", "shm") and can_share()
        arena = self.arena = Arena() if is_shared or backend == "nixl" else None
        self._agent = NixlAgent(arena) if arena is not None and backend == "nixl" else None
        self.offers = Offers(
            is_inline=backend in ("auto", "tcp"),
            shared=arena.place if arena is not None and is_shared else None,
            nixl=None if self._agent is None else self._agent.place,
        )

    def open(self, connection: Connection) -> BlockSender:
        """Offers the transports to the peer, which takes one."""
        connection.send(self.offers)
        choice = connection.receive()
        if not isinstance(choice, Choice):
            raise TransferError(f"a transport is chosen by a Choice, not by {choice}")
        if not self.offers.has(choice.transport):
            raise TransferError(
                f"the peer takes the transport {choice.transport}: it is not offered"
            )
        return BlockSender(
            connection, None if choice.transport == "tcp" else self.arena, choice.transport
        )

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()


# ------------------------------------------------------------ the decode side


class BlockReader(Protocol):
    """Brings the bytes of the blocks of one transfer. Used by the thread of its connection."""

    transport: Transport

    def fill(self, offset: int, values: memoryview) -> None:
        """Copies what lies at an offset of the peer's memory."""

    def forget(self) -> None:
        """Called if the transfer has broken off."""


class InlineReader:
    transport: Transport = "tcp"

    def fill(self, offset: int, values: memoryview) -> None:
        raise TransferError("a block in shared memory, but its bytes should follow")

    def forget(self) -> None:
        pass


class SharedReader:
    transport: Transport = "shm"

    def __init__(self, place: SharedPlace, opened: _Mapped) -> None:
        self._token = place.token
        self._opened = opened
        self._memory = opened.memory(place)

    def fill(self, offset: int, values: memoryview) -> None:
        _check(offset, len(values), len(self._memory))
        values[:] = self._memory[offset : offset + len(values)]

    def forget(self) -> None:
        self._opened.forget(self._token)


class NixlReader:
    transport: Transport = "nixl"

    def __init__(self, place: NixlPlace, agent: NixlAgent) -> None:
        self._place = place
        self._agent = agent

    def fill(self, offset: int, values: memoryview) -> None:
        _check(offset, len(values), self._place.num_bytes)
        self._agent.read(self._place, offset, values)

    def forget(self) -> None:
        self._agent.forget(self._place)


class _Mapped:
    """The memory of peers that this process has mapped. A mapping keeps the memory of a process
    that has ended, so that of a transfer that has broken off is forgotten.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: dict[bytes, memoryview] = {}  # by token

    def memory(self, place: SharedPlace) -> memoryview:
        with self._lock:
            if place.token not in self._memory:
                self._memory[place.token] = open_shared(place)
            return self._memory[place.token]

    def forget(self, token: bytes) -> None:
        with self._lock:
            self._memory.pop(token, None)


class BlockReaders:
    """Opens what prefill engines offer. Any thread may call it."""

    def __init__(self, backend: str) -> None:
        """`backend` is --disaggregation-transfer-backend. Raises ConfigError if there is none."""
        self._backend = backend
        self.agent = NixlAgent(Arena()) if backend == "nixl" else None
        self._mapped = _Mapped()

    def close(self) -> None:
        """Ends the transfers whose threads wait for an agent."""
        if self.agent is not None:
            self.agent.close()

    def choose(self, offers: Offers) -> BlockReader:
        """Raises TransferRefused if nothing that is offered may be used, or can be."""
        if self.agent is not None and offers.nixl is not None:
            return NixlReader(offers.nixl, self.agent)
        if self._backend in ("auto", "shm") and offers.shared is not None:
            try:
                return SharedReader(offers.shared, self._mapped)
            except OSError as error:
                if self._backend == "shm":
                    reason = f"its memory cannot be shared: {error}"
                    raise TransferRefused(
                        f"--disaggregation-transfer-backend shm: {reason}"
                    ) from None
        if self._backend in ("auto", "tcp") and offers.is_inline:
            return InlineReader()
        raise TransferRefused(
            f"--disaggregation-transfer-backend {self._backend}: the prefill engine has another one"
        )


def _check(offset: int, num_bytes: int, size: int) -> None:
    if not 0 <= offset <= size - num_bytes:
        raise TransferError(
            f"a block of {num_bytes} bytes at {offset}, but the shared memory has {size}"
        )


def receive_values(connection: Connection, block_reader: BlockReader, block: Block) -> memoryview:
    """Returns the bytes of a block. Raises TransferError if they are not those that were sent."""
    if block.num_bytes > MAX_BLOCK_BYTES:
        raise TransferError(f"a block of {block.num_bytes} bytes: at most {MAX_BLOCK_BYTES}")
    values: memoryview = np.empty(block.num_bytes, np.uint8).data  # not zeroed first
    if block.offset is None:
        connection.fill(values)
    else:
        block_reader.fill(block.offset, values)
        connection.send(Taken())
    if (found := checksum(values)) != block.checksum:
        raise TransferError(f"the checksum of a block is {found:#x}, not {block.checksum:#x}")
    return values


def checksum(values: memoryview) -> int:
    """Returns the CRC-32 of the sums of the words [n, 512] along both axes, and of the rest. A
    word, row or column that changed, or that stands elsewhere, changes it.

    PERF: sums are read at 10 GB/s, where CRC-32 of all bytes takes 3.6 (one core, busy).
    """
    num_rows = len(values) // ROW_BYTES
    words = np.frombuffer(values, np.uint64, count=num_rows * WORDS).reshape(num_rows, WORDS)
    found = zlib.crc32(values[num_rows * ROW_BYTES :])
    for axis in (0, 1):
        found = zlib.crc32(words.sum(axis=axis).data, found)
    return found
