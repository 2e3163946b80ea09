"""The communicator by which libraries of kernels exchange handles of memory at the start.

They know torch's default group or an object with MPI's methods. Ranks have no default group, so
their collectives of the host stand for that object.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import msgspec
import torch

from aserve.gpu.parallel.collectives import Collectives

MESSAGE_BYTES = 4096  # of a handle, or of the path of a socket
LENGTH = struct.Struct("<I")
Message: TypeAlias = str | bytes | bytearray | int | None


class HostComm:
    """Small messages between the ranks' hosts: None, integers, truth values, texts and bytes. It is
    FlashInfer's `CommBackend`."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def Get_rank(self) -> int:  # MPI's name
        return self._ranks.rank

    def Get_size(self) -> int:
        return self._ranks.num_ranks

    def allgather(self, data: Message) -> tuple[Any, ...]:
        message = LENGTH.pack(len(body := msgspec.msgpack.encode(data))) + body
        padded = bytearray(message.ljust(MESSAGE_BYTES, b"\0"))
        every = self._ranks.concat(torch.frombuffer(padded, dtype=torch.uint8))
        return tuple(_decoded(part.tobytes()) for part in every.view(-1, MESSAGE_BYTES).numpy())

    def bcast(self, data: Message, root: int) -> Any:
        return self.allgather(b"" if data is None else data)[root]

    def barrier(self) -> None:
        self._ranks.least(0)

    def Split(self, color: int, key: int) -> HostComm:
        raise NotImplementedError("ranks of one stage are not divided further")


def _decoded(data: bytes) -> Any:
    """Zeros follow the message."""
    [length] = LENGTH.unpack_from(data)
    return msgspec.msgpack.decode(data[LENGTH.size : LENGTH.size + length])
