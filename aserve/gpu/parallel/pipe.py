"""The pipe between neighbouring stages of a pipeline. It carries the hidden states of each step,
and from the last stage to the first one the drafts.

Stages are processes in a ring, joined by Unix sockets on one machine and by TCP between two. A
message is a header and the bytes of one tensor. It names its step, because a stage that has failed
drops steps which the stage before it has sent: what is older than the step that it asks for is
thrown away, and what is newer is kept.
"""

from __future__ import annotations

import socket
import struct
import weakref

import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.parallel.collectives import Collectives
from aserve.gpu.parallel.meeting import Door, enter
from aserve.parallel.topology import Coordinates, RankLost

HEADER = struct.Struct("<qq")  # iteration, bytes
STEP_S = 60.0  # for a neighbour's step, which may compile or compute a long chunk


class Pipe:
    """The two ends that one stage has. A neighbour that is lost ends the caller with RankLost."""

    __slots__ = ("__weakref__", "_after", "_before", "_kept")

    def __init__(self, before: socket.socket | None, after: socket.socket | None) -> None:
        """before: to the stage before this one; after: to the next one. None: it is not used."""
        self._before = before
        self._after = after
        self._kept: tuple[int, int] | None = None  # the header of a message that is not read yet
        for end in (before, after):
            if end is not None:
                end.settimeout(STEP_S)
                weakref.finalize(self, end.close)

    def send(self, iteration: int, values: Tensor) -> None:
        """Sends values of any shape and dtype to the next stage."""
        assert self._after is not None
        data = _bytes_of(values.contiguous())
        try:
            self._after.sendall(HEADER.pack(iteration, len(data)))
            self._after.sendall(data)
        except OSError as error:
            raise RankLost(f"the next stage does not read: {error}") from error

    def receive(self, iteration: int, into: Tensor) -> bool:
        """Fills a contiguous tensor with what the stage before sent for the step. Returns False if
        it sent nothing for it, and has gone on to a later step."""
        own = _bytes_of(into)
        while (header := self._header())[0] < iteration:
            self._fill(memoryview(bytearray(header[1])))
        if header[0] > iteration:
            self._kept = header
            return False
        if header[1] != len(own):
            raise BugError(f"step {iteration}: {header[1]} bytes came in place of {len(own)}")
        self._fill(own)
        return True

    def _header(self) -> tuple[int, int]:
        """Returns the iteration and the size of the next message."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        header = memoryview(bytearray(HEADER.size))
        self._fill(header)
        iteration, num_bytes = HEADER.unpack(header)
        return iteration, num_bytes

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


def _bytes_of(values: Tensor) -> memoryview:
    return memoryview(values.view(-1).view(torch.uint8).numpy().data)


def open_pipe(place: Coordinates, world: Collectives) -> Pipe:
    """Meets the neighbours, whose ranks in their stages are that of this one. All ranks of `world`
    do so together: each listens before any connects."""
    before_rank, next_rank = (
        (place.rank + step) % place.num_processes for step in (place.num_ranks, -place.num_ranks)
    )
    with Door(place, before_rank) as door:
        world.least(0)
        after = enter(place, next_rank)
        try:
            before = door.accepted()
        except TimeoutError as error:
            raise RankLost("the stage before did not come") from error
        return Pipe(before, after)
