"""The processes of the other ranks, as the process of rank 0 sees them: on its own machine, and on
others behind their hosts.

Rank 0 ends them. If it dies, its sockets close, and a rank whose socket closes ends, also while it
loads; so no rank outlives rank 0.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Protocol, TypeVar, cast

import msgspec

from aserve import frames
from aserve.errors import ConfigError, EngineDead
from aserve.parallel.topology import (
    SHARED_FOLDER,
    Answer,
    FromRank,
    RankFailed,
    StartRank,
    ToRank,
)
from aserve.processes.engine_process import DEATH_S, END_S, describe, spawned

T = TypeVar("T", bound=msgspec.Struct)

ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
RANK = (sys.executable, "-m", "aserve.parallel.rank")
SEND_S = 10.0  # for a rank that does not read
PIECE_BYTES = 1 << 16
BUFFER_BYTES = 4 << 20  # several steps of the longest prompts


class Process(Protocol):
    """The part of subprocess.Popen that counts. `wait` raises subprocess.TimeoutExpired."""

    returncode: int | None

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...


class RankProcess:
    """The process of one rank, and the socket to it. `where` says on which machine it is, if it is
    not this one."""

    def __init__(
        self, start: StartRank, sock: socket.socket, process: Process, *, where: str = ""
    ) -> None:
        self.number = start.coordinates.rank
        self.process = process
        self._where = where
        self.socket = sock
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.socket.settimeout(SEND_S)
        self._stream = cast(IO[bytes], self.socket.makefile("rwb"))
        self._splitter = frames.FrameSplitter()
        self.send(start)

    def send(self, message: ToRank) -> None:
        """Raises OSError if the rank has gone, or does not read."""
        frames.send(self._stream, message)

    def expect(self, kind: type[T], *, timeout_s: float) -> T:
        """Waits for the rank's next message. Raises the reason if the rank has failed or ended."""
        self.socket.settimeout(timeout_s)
        try:
            found: object = frames.receive(self._stream, FromRank)  # type: ignore[arg-type]  # union
        except TimeoutError:
            raise EngineDead(f"rank {self.number} did not answer in {timeout_s:.0f} s") from None
        except OSError:
            found = None
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
            code = self.process.wait(DEATH_S)
            return f"rank {self.number}{self._where} {describe(code)}"
        return f"rank {self.number}{self._where} closed its socket"

    def close(self) -> None:
        """Ends the rank by the end of its socket, within END_S."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self.socket.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)


def spawned_rank(start: StartRank) -> RankProcess:
    """Starts a rank on this machine."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawned(RANK, theirs)
    return RankProcess(start, ours, cast(Process, process))


def memory_folder() -> str:
    """The folder whose files are memory, where the machine has one."""
    return SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else tempfile.gettempdir()


@contextlib.contextmanager
def shared_folder(path: str) -> Iterator[str]:
    """Makes a folder for what ranks of one machine share, which may have several hosts."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
