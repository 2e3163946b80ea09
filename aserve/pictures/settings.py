"""Reads which sizes and scales of pictures a model was trained with, from its config.json and the
settings of its processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from aserve.errors import ConfigError
from aserve.json_file import texts_in
from aserve.messages.base import Record
from aserve.picture import Picture, PixelScale
from aserve.pictures.sizes import LongestEdge, PictureSize, PixelBounds

# The values of `Qwen2VLImageProcessor` in transformers.
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
LONGEST_EDGE = 1540  # of Mistral Small 3
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3
MERGE_SIZE = 2  # of squares of patches, where config.json is silent


class _Size(msgspec.Struct):
    shortest_edge: int | None = None
    longest_edge: int | None = None


class _Processor(msgspec.Struct):
    """The fields of preprocessor_config.json. `size` has the bounds in newer files."""

    patch_size: int | dict[str, int] | None = None
    merge_size: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    size: _Size | None = None
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD
    rescale_factor: float = 1 / 255
    resample: int = BICUBIC


def _pixel_bounds(given: _Processor) -> PictureSize:
    size = given.size or _Size()
    return PixelBounds(
        given.min_pixels or size.shortest_edge or MIN_PIXELS,
        given.max_pixels or size.longest_edge or MAX_PIXELS,
    )


def _longest_edge(given: _Processor) -> PictureSize:
    return LongestEdge((given.size or _Size()).longest_edge or LONGEST_EDGE)


class _Kind(msgspec.Struct, frozen=True):
    """How the models of an architecture read pictures."""

    patch_size: int  # where config.json is silent, as the token is
    token_id: int
    size: Callable[[_Processor], PictureSize] = _pixel_bounds
    breaks: tuple[str, str] | None = None  # tokens behind each row, and behind the last one


QWEN, QWEN3_5 = 151655, 248056  # <|image_pad|>
KINDS = {
    "Mistral3ForConditionalGeneration": _Kind(14, 10, _longest_edge, ("[IMG_BREAK]", "[IMG_END]")),
    "Qwen2VLForConditionalGeneration": _Kind(14, QWEN),
    "Qwen2_5_VLForConditionalGeneration": _Kind(14, QWEN),
    "Qwen3VLForConditionalGeneration": _Kind(16, QWEN),
    "Qwen3_5ForConditionalGeneration": _Kind(16, QWEN3_5),
    "Qwen3_5MoeForConditionalGeneration": _Kind(16, QWEN3_5),
}

TokenId: TypeAlias = Callable[[str], int | None]


class PictureSettings(Record, frozen=True):
    """`breaks` are the ids of the tokens behind each row of a picture, and behind its last one."""

    token_id: int  # that the chat template writes for a picture
    side: int  # pixels on a side of the square that becomes one token
    size: PictureSize
    scale: PixelScale
    resample: int = BICUBIC  # of PIL.Image.Resampling
    breaks: tuple[int, int] | None = None

    @property
    def num_breaks(self) -> int:
        """Returns the tokens behind each row."""
        return 0 if self.breaks is None else 1

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size to which a picture is resized."""
        columns, rows = self.size.tokens(width, height, side=self.side)
        return columns * self.side, rows * self.side

    def num_tokens(self, width: int, height: int) -> int:
        """Returns the tokens that a picture of this size takes."""
        columns, rows = self.size.tokens(width, height, side=self.side)
        return rows * (columns + self.num_breaks)

    def ids_of(self, picture: Picture) -> list[int]:
        """Returns the ids that stand for a picture."""
        row = [self.token_id] * picture.columns
        if self.breaks is None:
            return row * picture.rows
        between, last = self.breaks
        return [*[*row, between] * (picture.rows - 1), *row, last]


def picture_settings(
    config: Mapping[str, Any], processor: Mapping[str, Any], *, where: str, token_id: TokenId
) -> PictureSettings | None:
    """None for a model that reads no pictures. `where` is the model's directory, for errors.
    `token_id` returns the id of a token of the tokenizer."""
    kinds = [KINDS[name] for name in texts_in(config.get("architectures")) if name in KINDS]
    if not kinds:
        return None
    kind = kinds[0]
    try:
        given = msgspec.convert(processor, _Processor)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}/preprocessor_config.json: {error}") from None
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, dict) else {}  # the model refuses other values
    patch = vision.get("patch_size", kind.patch_size)
    merge = vision.get("spatial_merge_size", config.get("spatial_merge_size", MERGE_SIZE))
    stated = (given.patch_size or patch, given.merge_size or merge)
    if kind.size is _pixel_bounds and stated != (patch, merge):
        raise ConfigError(
            f"{where}: preprocessor_config.json has patches of {given.patch_size} and merges "
            f"{given.merge_size}, but the vision_config of config.json has {patch} and {merge}"
        )
    return PictureSettings(
        config.get("image_token_id", config.get("image_token_index", kind.token_id)),
        patch * merge,
        kind.size(given),
        PixelScale(given.rescale_factor, given.image_mean, given.image_std),
        given.resample,
        None if kind.breaks is None else _ids_of(kind.breaks, token_id, where),
    )


def _ids_of(names: tuple[str, str], token_id: TokenId, where: str) -> tuple[int, int]:
    first, last = (token_id(name) for name in names)
    if first is None or last is None:
        raise ConfigError(f"{where}: its tokenizer lacks one of {', '.join(names)}, of pictures")
    return first, last
