"""The processes of the other ranks, as the process of rank 0 sees them.

Whoever started them ends them. If it dies, its sockets close, and a rank whose socket closes ends;
so no rank outlives rank 0.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from aserve import frames
from aserve.config import Resolved
from aserve.errors import ConfigError, EngineDead
from aserve.parallel.topology import (
    Answer,
    Coordinates,
    FromRank,
    RankFailed,
    StartRank,
    ToRank,
)
from aserve.processes.engine_process import describe, spawned

T = TypeVar("T", bound=msgspec.Struct)

ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
RANK = (sys.executable, "-m", "aserve.parallel.rank")
SEND_S = 10.0  # for a rank that does not read
LOAD_S = 600.0  # for the other ranks to load after rank 0 has
END_S = 5.0  # for a rank's last step and its exit; afterwards it is killed
DEATH_S = 1.0  # from a socket's end to the exit code
PIECE_BYTES = 1 << 16
BUFFER_BYTES = 4 << 20  # several steps of the longest prompts


class RankProcess:
    """The process of one rank, and the socket to it."""

    def __init__(self, start: StartRank) -> None:
        self.number = start.coordinates.rank
        self.socket, theirs = socket.socketpair()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.socket.settimeout(SEND_S)
        with theirs:
            self.process = spawned(RANK, theirs)
        self._stream = cast(IO[bytes], self.socket.makefile("rwb"))
        self._splitter = frames.FrameSplitter()
        self.send(start)

    def send(self, message: ToRank) -> None:
        """Raises OSError if the rank has gone, or does not read."""
        frames.send(self._stream, message)

    def expect(self, kind: type[T], *, timeout_s: float = LOAD_S) -> T:
        """Waits for the rank's next message. Raises the reason if the rank has failed or ended."""
        self.socket.settimeout(timeout_s)
        try:
            found: object = frames.receive(self._stream, FromRank)  # type: ignore[arg-type]  # union
        except TimeoutError:
            raise EngineDead(f"rank {self.number} did not answer in {timeout_s:.0f} s") from None
        finally:
            self.socket.settimeout(SEND_S)
        if isinstance(found, kind):
            return found
        if isinstance(found, RankFailed):
            raise (ConfigError if found.is_config else EngineDead)(found.message)
        raise EngineDead(self.ending())

    def read_answers(self) -> list[Answer] | None:
        """Returns the answers that have come, when the socket can be read; None at its end."""
        try:
            piece = self.socket.recv(PIECE_BYTES)
        except OSError:
            piece = b""
        if not piece:
            return None
        found = self._splitter.feed(piece)
        return [ANSWERS.decode(frame) for frame in found]

    def ending(self) -> str:
        """Says how a process that has closed its socket has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"rank {self.number} {describe(self.process.wait(DEATH_S))}"
        return f"rank {self.number} closed its socket"

    def close(self) -> None:
        """Ends the rank by the end of its socket, within END_S."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self.socket.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def rank_processes(
    resolved: Resolved, model_dir: Path, store: Path
) -> Iterator[tuple[RankProcess, ...]]:
    """Starts all ranks but the first one. It ends them if the block raises, and only then."""
    num_stages = resolved.machine.pipeline_parallel_size
    first = Coordinates(0, resolved.num_ranks, str(store), num_stages, resolved.dp_size > 1)
    with contextlib.ExitStack() as undo:
        ranks = []
        for number in range(1, first.num_processes):
            place = msgspec.structs.replace(first, rank=number)
            rank = RankProcess(StartRank(resolved, str(model_dir), os.getcwd(), place))
            undo.callback(rank.close)
            ranks.append(rank)
        yield tuple(ranks)
        undo.pop_all()
