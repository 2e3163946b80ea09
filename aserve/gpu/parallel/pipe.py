"""The pipe between neighbouring stages of a pipeline: it carries the hidden states of each step.

Stages are processes, joined by Unix sockets on one machine and by TCP between two. A message is a
header and the bytes of one tensor. It names its step, because a stage that has failed drops steps
which the stage before it has sent: what is older than the step that it asks for is thrown away.
"""

from __future__ import annotations

import contextlib
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

    __slots__ = ("__weakref__", "_after", "_before")

    def __init__(self, before: socket.socket | None, after: socket.socket | None) -> None:
        """before: to the stage before this one; after: to the next one. None: there is none."""
        self._before = before
        self._after = after
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

    def receive(self, iteration: int, into: Tensor) -> None:
        """Fills a contiguous tensor with what the stage before sent for the step."""
        own = _bytes_of(into)
        header = memoryview(bytearray(HEADER.size))
        while True:
            self._fill(header)
            sent, num_bytes = HEADER.unpack(header)
            if sent == iteration:
                break
            self._fill(memoryview(bytearray(num_bytes)))
        if num_bytes != len(own):
            raise BugError(f"step {iteration}: {num_bytes} bytes came in place of {len(own)}")
        self._fill(own)

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
    before_rank, next_rank = place.rank + place.num_ranks, place.rank - place.num_ranks
    with contextlib.ExitStack() as undo:
        door = undo.enter_context(Door(place, before_rank)) if place.stage > 0 else None
        world.least(0)
        after = None if place.is_last_stage else enter(place, next_rank)
        try:
            before = None if door is None else door.accepted()
        except TimeoutError as error:
            raise RankLost("the stage before did not come") from error
        return Pipe(before, after)
