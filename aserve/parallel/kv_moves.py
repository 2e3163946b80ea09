"""The reads and writes of KV that rank 0 asks the other ranks for.

Each is ordered behind the launches that were sent before it. A request that awaits its KV is in no
step whose collectives would miss a rank that hangs, so each move has a limit of its own. Only the
event loop's thread writes the state.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from aserve.errors import EngineDead
from aserve.parallel.topology import KvDone, ReadKv, WriteKv

MOVE_S = 120.0  # for a rank, behind the steps that were launched before


class KvMoves:
    """`send` sends a message to a rank, and `miss` is told of a rank that has not moved KV."""

    def __init__(
        self,
        send: Callable[[int, ReadKv | WriteKv], None],
        miss: Callable[[EngineDead], None],
    ) -> None:
        self._send = send
        self._miss = miss
        self._open: dict[tuple[int, int], Future[bytes]] = {}  # by number and rank
        self._numbers = itertools.count()
        self._end = ""  # the reason for which nothing is moved any more

    def __len__(self) -> int:
        return len(self._open)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()

    def ask(self, rank: int, message: ReadKv | WriteKv) -> Future[bytes]:
        """Any thread may call it; only the event loop's sends. Reads are asked for there, and must
        be sent before the next launch."""
        done: Future[bytes] = Future()
        message = msgspec.structs.replace(message, number=next(self._numbers))
        if threading.get_ident() == self._thread:
            self._begin(rank, message, done)
        else:
            self._loop.call_soon_threadsafe(self._begin, rank, message, done)
        return done

    def settle(self, rank: int, answer: KvDone) -> None:
        moved = self._open.pop((answer.number, rank), None)
        if moved is None:
            return  # the engine has ended
        if answer.error:
            moved.set_exception(RuntimeError(answer.error))
        else:
            moved.set_result(answer.values)

    def end(self, reason: str) -> None:
        self._end = self._end or reason
        while self._open:
            _, moved = self._open.popitem()
            moved.set_exception(RuntimeError(reason))

    def _begin(self, rank: int, message: ReadKv | WriteKv, done: Future[bytes]) -> None:
        if self._end:
            done.set_exception(RuntimeError(self._end))
            return
        self._open[message.number, rank] = done
        limit = self._loop.call_later(MOVE_S, self._note_missing, rank)
        done.add_done_callback(lambda _: limit.cancel())
        self._send(rank, message)

    def _note_missing(self, rank: int) -> None:
        self._miss(EngineDead(f"rank {rank} has not moved KV in {MOVE_S:.0f} s"))
