"""Reads which sizes and scales of pictures a model was trained with, from its config.json and
preprocessor_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from aserve.errors import ConfigError, InvalidRequest
from aserve.json_file import texts_in
from aserve.messages.base import Record
from aserve.picture import PixelScale

# Architectures whose pictures are read, with the size of their patches where config.json is silent.
PATCH_SIZES = {
    "Qwen2VLForConditionalGeneration": 14,
    "Qwen2_5_VLForConditionalGeneration": 14,
    "Qwen3VLForConditionalGeneration": 16,
    "Qwen3_5ForConditionalGeneration": 16,
    "Qwen3_5MoeForConditionalGeneration": 16,
}
DEFAULT_TOKEN = 151655  # <|image_pad|> of Qwen's vocabulary
MAX_ASPECT = 200  # of the longer side to the shorter one
# The values of `Qwen2VLImageProcessor` in transformers.
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3


class _Size(msgspec.Struct):
    shortest_edge: int | None = None
    longest_edge: int | None = None


class _Processor(msgspec.Struct):
    """The fields of preprocessor_config.json. `size` has the bounds in newer files."""

    patch_size: int | None = None
    merge_size: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: _Size | None = None
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD
    rescale_factor: float = 1 / 255
    resample: int = BICUBIC


class PictureSettings(Record, frozen=True):
    token_id: int  # that the chat template writes for a picture
    side: int  # pixels on a side of the square that becomes one token
    min_pixels: int
    max_pixels: int
    scale: PixelScale
    resample: int = BICUBIC  # of PIL.Image.Resampling

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size to which a picture is resized: multiples of `side` near its own shape,
        with at least `min_pixels` and at most `max_pixels` (`smart_resize` in transformers)."""
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise InvalidRequest(
                f"a picture of {width} x {height} pixels is too narrow: one side is more than "
                f"{MAX_ASPECT} times the other",
                code="invalid_image",
            )
        side = self.side
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side * side < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return columns * side, rows * side


def picture_settings(
    config: Mapping[str, Any], processor: Mapping[str, Any], *, where: str
) -> PictureSettings | None:
    """None for a model that reads no pictures. `where` is the model's directory, for errors."""
    names = [name for name in texts_in(config.get("architectures")) if name in PATCH_SIZES]
    if not names:
        return None
    try:
        given = msgspec.convert(processor, _Processor)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}/preprocessor_config.json: {error}") from None
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, dict) else {}  # the model refuses other values
    patch = vision.get("patch_size", PATCH_SIZES[names[0]])
    merge = vision.get("spatial_merge_size", 2)
    if (given.patch_size or patch, given.merge_size or merge) != (patch, merge):
        raise ConfigError(
            f"{where}: preprocessor_config.json has patches of {given.patch_size} and merges "
            f"{given.merge_size}, but the vision_config of config.json has {patch} and {merge}"
        )
    size = given.size or _Size()
    return PictureSettings(
        config.get("image_token_id", DEFAULT_TOKEN),
        patch * merge,
        given.min_pixels or size.shortest_edge or MIN_PIXELS,
        given.max_pixels or size.longest_edge or MAX_PIXELS,
        PixelScale(given.rescale_factor, given.image_mean, given.image_std),
        given.resample,
    )
