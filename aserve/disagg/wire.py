"""The protocol of transfers: one connection for each, with messages and blocks of KV.

The decode side sends one Fetch. The prefill side answers with Offers, the transports by which the
bytes of blocks can travel, of which the decode side takes one by Choice. Then come Blocks in order,
which cover the tokens that were asked for, or Failed. The prefill side sends Waiting when it has
nothing else to send, so that a peer which says nothing for IDLE_S is known to be gone.

A message is its length (4 bytes, little-endian) and msgpack. The bytes of a Block follow, or lie in
the memory of the prefill side until the decode side answers with Taken. Every Block has a checksum
(transports.py), because a changed byte would change the answer and nothing else.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Literal, TypeAlias

import msgspec

from aserve.errors import UNDECODABLE

VERSION = 5
CONNECT_S = 5.0
IDLE_S = 10.0
WAITING_S = 1.0  # between two signs of life
MAX_MESSAGE_BYTES = 64 << 20  # a Fetch has the ids of a prompt, and all else is small

LENGTH = struct.Struct("<I")

# tcp: the bytes of a Block follow it. shm: they lie in memory that both sides have mapped. nixl: in
# memory that NIXL reads.
Transport: TypeAlias = Literal["tcp", "shm", "nixl"]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Asks for the KV of tokens from `first` on, but for that of the last one, which is there
    because a drafter's KV may depend on the token behind. `model` and `geometry` must be the peer's
    own.
    """

    version: int
    key: str
    model: str
    geometry: str
    first: int
    token_ids: bytes  # int32
    namespace: str


class SharedPlace(msgspec.Struct, frozen=True, tag=True):
    """Memory of the prefill side, for a peer on the same machine (arena.py)."""

    process: int
    file: int
    token: bytes
    num_bytes: int


class NixlPlace(msgspec.Struct, frozen=True, tag=True):
    """Memory of the prefill side that its agent of NIXL has registered."""

    agent: str
    metadata: bytes
    address: int
    num_bytes: int


class Offers(msgspec.Struct, frozen=True, tag=True):
    """The transports that the prefill side has."""

    is_inline: bool = True  # bytes of blocks may follow them
    shared: SharedPlace | None = None
    nixl: NixlPlace | None = None

    def has(self, transport: Transport) -> bool:
        places = {"tcp": self.is_inline, "shm": self.shared, "nixl": self.nixl}
        return bool(places[transport])


class Choice(msgspec.Struct, frozen=True, tag=True):
    """The transport of this transfer."""

    transport: Transport


class Block(msgspec.Struct, frozen=True, tag=True):
    """The KV of `num_tokens` tokens from `first` on, of the layers from `from_layer` on, of which
    there are `num_layers`. Tokens whose layers come in several blocks count with the last layer. A
    block that begins with layer 0 of tokens whose last layer has not come begins them anew. Its
    bytes follow, or lie at `offset` of the memory that was offered.
    """

    first: int
    num_tokens: int
    num_bytes: int
    from_layer: int
    num_layers: int
    checksum: int
    offset: int | None = None


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The decode side has copied the bytes of one more Block with an offset, in their order."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The prompt is still being computed."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The KV will not come."""

    reason: str


Message: TypeAlias = Fetch | Offers | Choice | Block | Taken | Waiting | Failed

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


class TransferError(Exception):
    """The peer has broken the protocol."""


class TransferRefused(TransferError):
    """The peer has refused this transfer. It may take others."""


class Connection:
    """A blocking socket that carries messages. Used by one thread; any thread may `abort` it."""

    __slots__ = ("_socket",)

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(IDLE_S)
        with contextlib.suppress(OSError):  # a Unix socket has no such option
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock

    def send(self, message: Message) -> None:
        body = _ENCODER.encode(message)
        self._socket.sendall(LENGTH.pack(len(body)) + body)

    def send_values(self, block: Block, values: memoryview) -> None:
        self.send(block)
        self._socket.sendall(values)

    def receive(self) -> Message:
        """Raises TransferError for bytes that are no message, and OSError if the peer is gone."""
        [length] = LENGTH.unpack(self._exactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise TransferError(f"a message of {length} bytes: at most {MAX_MESSAGE_BYTES}")
        try:
            message: Message = _DECODER.decode(self._exactly(length))
        except UNDECODABLE as error:
            raise TransferError(f"not a message of this protocol: {error}") from None
        return message

    def fill(self, values: memoryview) -> None:
        """Receives bytes that follow a message."""
        done = 0
        while done < len(values):
            received = self._socket.recv_into(values[done:])
            if not received:
                raise ConnectionError("the peer closed the connection")
            done += received

    def abort(self) -> None:
        """Ends what the connection's thread is doing with an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.fill(memoryview(data))
        return data


def connect(host: str, port: int) -> Connection:
    return Connection(socket.create_connection((host, port), timeout=CONNECT_S))
