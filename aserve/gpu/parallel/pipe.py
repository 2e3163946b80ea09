"""The pipe between neighbouring stages of a pipeline. It carries the hidden states of each step,
and from the last stage to the first one the drafts.

Stages are processes in a ring, joined by Unix sockets on one machine and by TCP between two. A
message is a header and the bytes of one tensor. It names its step, because a stage that has failed
drops steps which the stage before it has sent: what is older than the step that it asks for is
thrown away, and what is newer is kept. A move of KV, which follows from a draft tree, is handled
when it comes, whatever is asked for.

Between devices only the header goes through the socket, when the host of the stage before has
launched its step. The tensor goes by a `DeviceLink`, for which no host waits.
"""

from __future__ import annotations

import socket
import struct
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.parallel.collectives import Collectives
from aserve.gpu.parallel.meeting import Door, enter
from aserve.parallel.topology import Coordinates, RankLost

HEADER = struct.Struct("<qq?")  # iteration, bytes, whether it is a move
STEP_S = 60.0  # for a neighbour's step, which may compile or compute a long chunk


class DeviceLink(Protocol):
    """Sends bytes between the devices of neighbouring stages, in order. Each `send` needs a
    `receive` of as many bytes by the next stage."""

    @property
    def device(self) -> torch.device: ...

    def send(self, data: Tensor) -> None:
        """data uint8 [bytes], to the next stage. The caller's stream does not wait for it, so
        nobody writes to `data` any more."""

    def receive(self, into: Tensor) -> None:
        """into uint8 [bytes], from the stage before. The caller's stream waits for it."""


class Pipe:
    """The two ends that one stage has. A neighbour that is lost ends the caller with RankLost."""

    __slots__ = (*("__weakref__", "_after", "_before", "_kept", "_link", "device", "on_move"),)

    def __init__(
        self,
        before: socket.socket | None,
        after: socket.socket | None,
        link: DeviceLink | None = None,
    ) -> None:
        """before: to the stage before this one; after: to the next one. None: it is not used.
        Tensors are on the device of `link`, or on the CPU."""
        self.device = torch.device("cpu") if link is None else link.device
        self._link = link
        self._before = before
        self._after = after
        self._kept: tuple[int, int] | None = None  # the header of a message that is not read yet
        self.on_move: Callable[[int, Tensor], None] | None = None
        for end in (before, after):
            if end is not None:
                end.settimeout(STEP_S)
                weakref.finalize(self, end.close)

    def send(self, iteration: int, values: Tensor, *, is_move: bool = False) -> None:
        """Sends values of any shape and dtype to the next stage."""
        assert self._after is not None
        data = _bytes_of(values.contiguous())
        try:
            self._after.sendall(HEADER.pack(iteration, len(data), is_move))
            if self._link is None:
                self._after.sendall(data.numpy().data)
            elif len(data):
                self._link.send(data)
        except OSError as error:
            raise RankLost(f"the next stage does not read: {error}") from error

    def receive(self, iteration: int, into: Tensor) -> bool:
        """Fills a contiguous tensor with what the stage before sent for the step. Returns False if
        it sent nothing for it, and has gone on to a later step."""
        own = _bytes_of(into)
        if (num_bytes := self._size_of(iteration)) is None:
            return False
        if num_bytes != len(own):
            self._read(num_bytes)
            raise BugError(f"step {iteration}: {num_bytes} bytes came in place of {len(own)}")
        self._take(own)
        return True

    def take(self, iteration: int) -> Tensor | None:
        """Returns what the stage before sent for the step, uint8 [bytes], or None where `receive`
        returns False."""
        num_bytes = self._size_of(iteration)
        return None if num_bytes is None else self._read(num_bytes)

    def _size_of(self, iteration: int) -> int | None:
        """Returns the bytes of the step's message, or None if the next one is of a later step."""
        while (header := self._header())[0] < iteration:
            self._read(header[1])
        if header[0] > iteration:
            self._kept = header
            return None
        return header[1]

    def _take(self, data: Tensor) -> None:
        """Fills uint8 [bytes] with what follows a header."""
        if self._link is None:
            self._fill(data.numpy().data)
        elif len(data):
            self._link.receive(data)

    def _header(self) -> tuple[int, int]:
        """Returns the iteration and the size of the next message, behind all moves before it."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        while True:
            header = bytearray(HEADER.size)
            self._fill(memoryview(header))
            iteration, num_bytes, is_move = HEADER.unpack(header)
            if not is_move:
                return iteration, num_bytes
            assert self.on_move is not None
            self.on_move(iteration, self._read(num_bytes))

    def _read(self, num_bytes: int) -> Tensor:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._take(data)
        return data

    def _fill(self, data: memoryview) -> None:
        assert self._before is not None
        done = 0
        try:
            while done < len(data):
                count = self._before.recv_into(data[done:])
                if not count:
                    raise RankLost("the stage before has ended")
                done += count
        except OSError as error:
            raise RankLost(f"the stage before sends nothing: {error}") from error


def _bytes_of(values: Tensor) -> Tensor:
    return values.view(-1).view(torch.uint8)


def neighbours(place: Coordinates) -> tuple[int, int]:
    """Returns the ranks before and after this one. In their stages they have the same number."""
    before, after = (
        (place.rank + step) % place.num_processes for step in (place.num_ranks, -place.num_ranks)
    )
    return before, after


def open_pipe(place: Coordinates, world: Collectives, link: DeviceLink | None = None) -> Pipe:
    """Meets the neighbours. All ranks of `world` do so together: each listens before it calls."""
    before_rank, next_rank = neighbours(place)
    with Door(place, before_rank) as door:
        world.least(0)
        after = enter(place, next_rank)
        try:
            before = door.accepted()
        except TimeoutError as error:
            raise RankLost("the stage before did not come") from error
        return Pipe(before, after, link)
