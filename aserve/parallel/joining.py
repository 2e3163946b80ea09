"""Joins another machine to an engine: by a TCP connection to rank 0, with these messages on it.

Both ends first show that they know the same key, without sending it. What follows is not encrypted.
A rank host, the process that starts ranks on another machine, has one such connection, and each of
its ranks gets one of its own, on which it hears from rank 0 as a rank on rank 0's machine does on a
socket pair.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import sys
import threading
import time
from collections import deque
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from aserve.errors import UNDECODABLE, ConfigError
from aserve.frames import FrameSplitter, framed
from aserve.messages.base import Message

T = TypeVar("T")

PROOF_BYTES = 32  # of SHA-256; a nonce has as many
PROVE_S = 5.0  # for the peer to show that it knows the key
SEND_S = 10.0  # for a peer that does not read
PIECE_BYTES = 1 << 16
# Seconds without a word from the other machine, until the kernel asks it; from one question to the
# next; and questions without an answer, until it counts as lost.
ASK_AFTER_S, ASK_EVERY_S, NUM_ASKS = 4, 2, 3
# A machine may also answer the kernel's questions while its processes stand still.
ALIVE_EVERY_S = 1.0


class Leader(NamedTuple):
    """The address at which rank 0 listens, and the key."""

    host: str
    port: int
    key: str


class JoinAsHost(Message, frozen=True):
    """The first message of a rank host. Paths are those of its machine."""

    version: str
    number: int
    directory: str
    model_dir: str
    shared_folder: str


class JoinAsRank(Message, frozen=True):
    """The first message of a connection that its host opened for a rank."""

    launch: str
    rank: int


class StartRanks(Message, frozen=True):
    """Asks a host for the processes of these ranks. `folder` is made for what they share."""

    launch: str
    ranks: tuple[int, ...]
    folder: str


class RanksLoaded(Message, frozen=True):
    """All ranks have met, so the folder is of no more use."""


class KillRanks(Message, frozen=True):
    """A rank was lost, so those of this host will never end their step."""


class EndRanks(Message, frozen=True):
    """The engine has ended. With `is_over` no other follows; `reason` tells of a failure."""

    is_over: bool
    reason: str = ""


class RankEnded(Message, frozen=True):
    """The process of a rank has ended."""

    rank: int
    code: int


class HostAlive(Message, frozen=True):
    """The host still runs. It says so every ALIVE_EVERY_S."""


Join: TypeAlias = JoinAsHost | JoinAsRank
FromHost: TypeAlias = RankEnded | HostAlive
ToHost: TypeAlias = StartRanks | RanksLoaded | KillRanks | EndRanks


class WrongKey(ConfigError):
    """The peer does not know the key of this end."""


def prove(sock: socket.socket, key: str, *, is_leader: bool) -> None:
    """Shows the peer that this end knows the key, and raises WrongKey if the peer does not. Raises
    OSError if it goes away or is silent.

        nonce_a, nonce_b      drawn at random, one by each end
        proof_a = HMAC-SHA256(key, role_a | nonce_a | nonce_b)

    The leader proves last, so that a stranger learns nothing with which keys could be tried.
    """
    sock.settimeout(PROVE_S)
    roles = (b"leader", b"host") if is_leader else (b"host", b"leader")
    own = secrets.token_bytes(PROOF_BYTES)
    sock.sendall(own)
    theirs = _exactly(sock, PROOF_BYTES)
    proof = hmac.digest(key.encode(), roles[0] + own + theirs, "sha256")
    expected = hmac.digest(key.encode(), roles[1] + theirs + own, "sha256")
    if not is_leader:
        sock.sendall(proof)
    is_known = hmac.compare_digest(_exactly(sock, PROOF_BYTES), expected)
    if is_leader:
        sock.sendall(proof if is_known else bytes(PROOF_BYTES))
    if not is_known:
        raise WrongKey("the other end has another --dist-key; give all nodes the same one")


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = sock.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("the other end closed the connection")
        data += piece
    return bytes(data)


def watched(sock: socket.socket) -> socket.socket:
    """Sets a TCP socket up for short messages, and for noticing a machine that is lost."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_AFTER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_ASKS)
        lost_ms = 1000 * (ASK_AFTER_S + ASK_EVERY_S * NUM_ASKS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_ms)
    return sock


class Control(Generic[T]):
    """The messages of a connection. `kind` is that of received ones. Threads may send, and several
    may receive; each message is received once."""

    def __init__(self, sock: socket.socket, kind: object) -> None:
        self.socket = sock
        self._decoder = cast("msgspec.msgpack.Decoder[T]", msgspec.msgpack.Decoder(kind))
        self._splitter = FrameSplitter()
        self._found: deque[T] = deque()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        sock.settimeout(SEND_S)

    def send(self, message: Message) -> bool:
        """Returns whether the peer is still there."""
        with contextlib.suppress(OSError), self._sending:
            self.socket.sendall(framed(msgspec.msgpack.encode(message)))
            return True
        return False

    def receive(self, timeout_s: float | None) -> T | None:
        """Returns None at the end of the connection. Raises TimeoutError."""
        with self._receiving:
            ends_s = None if timeout_s is None else time.monotonic() + timeout_s
            while not self._found:
                if not self._has_read(ends_s):
                    return None
            return self._found.popleft()

    def _has_read(self, ends_s: float | None) -> bool:
        if self.socket.fileno() < 0:
            return False
        if not _is_readable(self.socket, ends_s):
            raise TimeoutError
        try:
            piece = self.socket.recv(PIECE_BYTES)
            frames = self._splitter.feed(piece)
            self._found += [self._decoder.decode(frame) for frame in frames]
        except (OSError, *UNDECODABLE):
            return False
        return bool(piece)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _is_readable(sock: socket.socket, ends_s: float | None) -> bool:
    """Waits until the socket can be read, or the time is over."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    left_ms = None if ends_s is None else max(0.0, 1000 * (ends_s - time.monotonic()))
    return bool(poll.poll(left_ms))
