"""The base classes of messages, and arrays in messages.

An array is `bytes` (little endian), so that messages can be compared, hashed and sent to another
process without conversion.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "deadline", "shutdown", "error"]
CancelReason: TypeAlias = Literal["stop", "cancelled", "deadline", "shutdown"]
ServerPhase: TypeAlias = Literal["starting", "ready", "draining", "dead"]
ChildKey: TypeAlias = tuple[str, int]  # request_id and child
ArrayI32: TypeAlias = npt.NDArray[np.int32]
ArrayF32: TypeAlias = npt.NDArray[np.float32]

VALUE_BYTES = 4  # of an int32 or float32
MAX_INT32, MAX_INT64 = (1 << 31) - 1, (1 << 63) - 1
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30  # bytes
MASK_BITS = 32  # token ids in each int32 word of a grammar mask


def pack_i32(values: ArrayI32 | npt.NDArray[np.int64] | list[int] | tuple[int, ...]) -> bytes:
    return np.asarray(values, dtype=np.int32).tobytes()


def array_i32(data: bytes) -> ArrayI32:
    """Returns a read-only view; copy it before writing."""
    return np.frombuffer(data, dtype=np.int32)


def split_i32(data: bytes, width: int = 1) -> list[bytes]:
    """Returns the pieces of an array that have `width` values each."""
    pieces: list[bytes] = np.frombuffer(data, (np.void, VALUE_BYTES * width)).tolist()
    return pieces


def array_f32(data: bytes) -> ArrayF32:
    return np.frombuffer(data, dtype=np.float32)


def num_values(data: bytes | bytearray) -> int:
    """Returns the length of an int32 or float32 array."""
    return len(data) // VALUE_BYTES


def num_mask_words(vocab_size: int) -> int:
    """Returns the length of a grammar mask, which is an int32 array with one bit per token id."""
    return -(-vocab_size // MASK_BITS)


class Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A message from one actor to another."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """A part of a message."""
