"""The sizes to which models have pictures resized: a whole number of tokens on each side."""

from __future__ import annotations

import math
from typing import TypeAlias

from aserve.errors import InvalidRequest
from aserve.messages.base import Record

MAX_ASPECT = 200  # of the longer side to the shorter one


class PixelBounds(Record, frozen=True, tag=True):
    """A size near the picture's own, with so many pixels (`smart_resize` of Qwen2-VL in
    transformers)."""

    min_pixels: int
    max_pixels: int

    def tokens(self, width: int, height: int, *, side: int) -> tuple[int, int]:
        """Returns the columns and rows of tokens, each of `side` x `side` pixels."""
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise InvalidRequest(
                f"a picture of {width} x {height} pixels is too narrow: one side is more than "
                f"{MAX_ASPECT} times the other",
                code="invalid_image",
            )
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side * side < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return columns, rows


class LongestEdge(Record, frozen=True, tag=True):
    """The picture's own size, or smaller (`get_resize_output_image_size` of Pixtral in
    transformers). The last tokens of a row and a column are filled by stretching it."""

    pixels: int

    def tokens(self, width: int, height: int, *, side: int) -> tuple[int, int]:
        """Returns the columns and rows of tokens, each of `side` x `side` pixels."""
        shrink = max(width / self.pixels, height / self.pixels, 1.0)
        columns, rows = (-(-math.floor(size / shrink) // side) for size in (width, height))
        return max(1, columns), max(1, rows)


class FixedSize(Record, frozen=True, tag=True):
    """The same square for all pictures, whatever their shape."""

    tokens_per_side: int

    def tokens(self, _width: int, _height: int, *, side: int) -> tuple[int, int]:
        """Returns the columns and rows of tokens, each of `side` x `side` pixels."""
        return self.tokens_per_side, self.tokens_per_side


PictureSize: TypeAlias = PixelBounds | LongestEdge | FixedSize
