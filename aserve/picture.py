"""A picture in a prompt: its pixels, the tokens it takes, and the positions of tokens around it.

The frontend decodes and resizes a picture, and the engine encodes it. In between it is a value that
messages carry.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32
NUM_AXES = 3  # of rotary positions: time, row, column


class PictureSource(msgspec.Struct, frozen=True):
    """A picture as the client gave it. `param` and `kind` name its part of the body in errors.
    `data` is its file, where it was fetched."""

    url: str
    param: str
    kind: str
    data: bytes = b""


class PixelScale(msgspec.Struct, frozen=True):
    """The numbers that a vision encoder reads: `(value * factor - mean) / std` of each channel."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Picture(msgspec.Struct, frozen=True):
    """`rows` x `columns` features, row by row, for tokens from the prompt's token `start` on. Some
    models have a token of text behind each row: `num_breaks` is 1 there. With `sees_itself`, its
    tokens see each other, and are computed in one step. `pixels` are uint8
    [rows * side, columns * side, 3], red, green and blue, where `side` is the model's."""

    rows: int
    columns: int
    pixels: bytes
    scale: PixelScale
    digest: bytes  # of all of the above: equal pictures have equal features
    num_breaks: int = 0
    sees_itself: bool = False
    start: int = 0

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.columns + self.num_breaks)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def features_of(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """int32 [n]: the feature of each token, counted from the first one; -1 for a break."""
        row, column = np.divmod(tokens, self.columns + self.num_breaks)
        found = np.where(column < self.columns, row * self.columns + column, -1)
        return found.astype(np.int32)


def make_picture(
    pixels: npt.NDArray[np.uint8],
    *,
    side: int,
    scale: PixelScale,
    num_breaks: int = 0,
    sees_itself: bool = False,
) -> Picture:
    """pixels [height, width, 3], both multiples of `side`."""
    rows, columns = (size // side for size in pixels.shape[:2])
    data = np.ascontiguousarray(pixels).tobytes()
    facts = msgspec.msgpack.encode((rows, columns, scale))
    digest = blake2b(data, digest_size=DIGEST_BYTES, key=blake2b(facts).digest()).digest()
    return Picture(rows, columns, data, scale, digest, num_breaks, sees_itself)


def page_digests(pictures: Iterable[Picture], start: int, stop: int) -> bytes:
    """Returns the digests of the pictures that have tokens in start..stop. They join the key of a
    page of these tokens, since all placeholders have the same id."""
    return b"".join(p.digest for p in pictures if p.start < stop and start < p.end)


def rope_offsets(pictures: Iterable[Picture]) -> npt.NDArray[np.int32]:
    """int32 [axes, n]: what is added to a token's place in the prompt to get its rotary positions.
    The last column is that of all further tokens, those of the output included.

    Tokens of text count on all axes. Those of a picture stay at the time of its first token and
    count rows and columns from there, and the text behind it goes on after the longer side
    (`get_rope_index` in transformers).
    """
    parts = [np.zeros((NUM_AXES, 0), np.int32)]
    end = offset = 0
    for picture in pictures:
        places = np.arange(picture.num_tokens, dtype=np.int32)
        axes = (np.zeros_like(places), places // picture.columns, places % picture.columns)
        parts += [_constant(offset, picture.start - end), offset - places + np.stack(axes)]
        offset += max(picture.rows, picture.columns) - picture.num_tokens
        end = picture.end
    return np.concatenate([*parts, _constant(offset, 1)], axis=1, dtype=np.int32)


def _constant(value: int, length: int) -> npt.NDArray[np.int32]:
    return np.full((NUM_AXES, length), value, np.int32)
