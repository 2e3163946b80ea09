"""Blocks in memory that two processes map, and the choice of a transport."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from aserve.disagg.arena import HEAD_BYTES, Arena, open_shared
from aserve.disagg.transports import (
    BlockReader,
    BlockReaders,
    BlockSender,
    BlockSenders,
    SharedReader,
    checksum,
    receive_values,
)
from aserve.disagg.wire import (
    Block,
    Choice,
    Connection,
    Offers,
    SharedPlace,
    TransferError,
    TransferRefused,
    Transport,
)

KV = secrets.token_bytes(1000)

ELSEWHERE: dict[str, Callable[[SharedPlace], SharedPlace]] = {
    "another token": lambda place: msgspec.structs.replace(place, token=bytes(16)),
    "another size": lambda place: msgspec.structs.replace(place, num_bytes=4096),
    "no such process": lambda place: msgspec.structs.replace(place, process=1 << 22),
    "a file of this process": lambda place: msgspec.structs.replace(
        place, file=os.open(__file__, os.O_RDONLY)
    ),
}


@pytest.fixture
def arena() -> Iterator[Arena]:
    with contextlib.closing(Arena(slot_bytes=4096, num_slots=2)) as made:
        yield made
        assert made.num_free == 2, "a slot was not given back"


@contextlib.contextmanager
def sending(*sizes: int, arena: Arena | None) -> Iterator[Connection]:
    """A prefill engine that sends blocks of these sizes, as seen by its peer."""

    def send() -> None:
        with contextlib.closing(BlockSender(here, arena)) as block_sender:
            for size in sizes:
                block_sender.send(range(1), range(1), memoryview(KV[:size]))
            block_sender.end()

    left, right = socket.socketpair()
    here, there = Connection(left), Connection(right)
    thread = threading.Thread(target=send)
    thread.start()
    with contextlib.closing(here), contextlib.closing(there):
        yield there
        thread.join()


def next_block(connection: Connection) -> Block:
    block = connection.receive()
    assert isinstance(block, Block)
    return block


def test_blocks_lie_in_shared_memory_as_far_as_slots_are_free(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aserve.disagg.transports.MAX_UNTAKEN", 1)
    held = arena.take()
    assert held is not None
    block_reader = BlockReaders("shm").choose(Offers(shared=arena.place))
    assert block_reader.transport == "shm"
    with sending(1000, 700, arena=arena) as connection:
        for size in (1000, 700):  # the second one waits for the slot of the first one
            block = next_block(connection)
            assert block.offset == HEAD_BYTES + 4096
            assert receive_values(connection, block_reader, block) == KV[:size]
    second = arena.take()
    assert second is not None
    with sending(1000, arena=arena) as connection:
        block = next_block(connection)
        assert block.offset is None
        assert receive_values(connection, block_reader, block) == KV
    for offset in (held, second):
        arena.give_back(offset)


def test_slots_of_blocks_that_the_peer_never_took_are_given_back(arena: Arena) -> None:
    left, right = socket.socketpair()
    with contextlib.closing(Connection(left)) as here, contextlib.closing(Connection(right)):
        block_sender = BlockSender(here, arena)
        block_sender.send(range(1), range(1), memoryview(KV))
        assert arena.num_free == 1
        block_sender.close()
    assert arena.num_free == 2


def test_a_block_that_is_larger_than_a_slot_follows(arena: Arena) -> None:
    small = Arena(slot_bytes=999, num_slots=1)
    with contextlib.closing(small), sending(1000, arena=small) as connection:
        assert next_block(connection).offset is None
        values = memoryview(bytearray(1000))
        connection.fill(values)
        assert values == KV


def test_bytes_that_changed_in_shared_memory_are_found(arena: Arena) -> None:
    block_reader = BlockReaders("auto").choose(Offers(shared=arena.place))
    with sending(1000, arena=arena) as connection:
        block = next_block(connection)
        assert block.offset is not None
        arena.memory[block.offset + 999] ^= 1
        with pytest.raises(TransferError, match="checksum of a block is"):
            receive_values(connection, block_reader, block)
        for offset in (-1, len(arena.memory) - 999):
            with pytest.raises(TransferError, match="the shared memory has"):
                block_reader.fill(offset, memoryview(bytearray(1000)))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_memory_that_is_not_the_peers_is_not_read(name: str, arena: Arena) -> None:
    place = ELSEWHERE[name](arena.place)
    with pytest.raises(OSError, match=rf"/proc/{place.process}/fd/{place.file}|Invalid argument"):
        open_shared(place)
    assert BlockReaders("auto").choose(Offers(shared=place)).transport == "tcp"
    with pytest.raises(TransferRefused, match="memory cannot be shared"):
        BlockReaders("shm").choose(Offers(shared=place))
    if name == "a file of this process":
        os.close(place.file)


@pytest.mark.parametrize(
    ("backend", "offers"),
    [("shm", Offers()), ("tcp", Offers(is_inline=False)), ("auto", Offers(is_inline=False))],
)
def test_a_transport_that_is_not_offered_is_not_used(backend: str, offers: Offers) -> None:
    with pytest.raises(TransferRefused, match=f"backend {backend}: the prefill engine has another"):
        BlockReaders(backend).choose(offers)


@pytest.mark.parametrize(
    ("backend", "transport"), [("shm", "tcp"), ("tcp", "shm"), ("tcp", "nixl")]
)
def test_a_transport_that_was_not_offered_cannot_be_chosen(
    backend: str, transport: Transport
) -> None:
    left, right = socket.socketpair()
    here, there = Connection(left), Connection(right)
    with contextlib.closing(here), contextlib.closing(there):
        there.send(Choice(transport))
        with pytest.raises(TransferError, match="it is not offered"):
            BlockSenders(backend).open(here)


@pytest.mark.parametrize("size", [0, 7, 4096, 12_299])
def test_a_checksum_sees_each_bit_and_the_order(size: int) -> None:
    values = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    seen = {checksum(values.data), checksum(bytes(size + 1))}  # type: ignore[arg-type]  # bytes
    for at in {0, size // 2, size - 1} if size else ():
        values[at] ^= 1
        seen.add(checksum(values.data))
    rows = values[: size // 4096 * 4096].view(np.uint64).reshape(-1, 512)
    orders = (rows[::-1], rows[:, ::-1]) if len(rows) else ()
    for order in orders[2 - min(len(rows), 2) :]:
        seen.add(
            checksum(
                np.concatenate([order.copy().view(np.uint8).ravel(), values[rows.nbytes :]]).data
            )
        )
    assert len(seen) == 2 + (3 if size else 0) + min(len(rows), 2)


OWNER = """
import sys
from aserve.disagg.arena import Arena
from msgspec import json
arena = Arena()
arena.memory[4096:4100] = b"KV!!"
print(json.encode(arena.place).decode(), flush=True)
sys.stdin.read()
"""


def test_memory_ends_with_its_owner_but_for_those_who_have_mapped_it() -> None:
    command = (sys.executable, "-c", OWNER)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        place = msgspec.json.decode(owner.stdout.readline(), type=SharedPlace)
        memory = open_shared(place)
        owner.kill()
    assert bytes(memory[4096:4100]) == b"KV!!"
    with pytest.raises(FileNotFoundError):
        open_shared(place)


def test_the_memory_of_a_peer_is_mapped_once_until_a_transfer_fails(arena: Arena) -> None:
    block_readers, offers = BlockReaders("auto"), Offers(shared=arena.place)

    def memory(block_reader: BlockReader) -> object:
        assert isinstance(block_reader, SharedReader)
        return block_reader._memory

    first = block_readers.choose(offers)
    assert memory(block_readers.choose(offers)) is memory(first)
    first.forget()
    assert memory(block_readers.choose(offers)) is not memory(first)
