"""Reads which sizes and scales of pictures a model was trained with, from its config.json and the
settings of its processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from aserve.errors import ConfigError
from aserve.json_file import texts_in
from aserve.messages.base import Record
from aserve.picture import Picture, PixelScale
from aserve.pictures.sizes import FixedSize, LongestEdge, PictureSize, PixelBounds

# The values of `Qwen2VLImageProcessor` in transformers.
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
LONGEST_EDGE = 1540  # of Mistral Small 3
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3

Triple: TypeAlias = tuple[float, float, float]
T = TypeVar("T")


class _Vision(msgspec.Struct):
    patch_size: int | None = None
    spatial_merge_size: int | None = None
    image_size: int | None = None


class _Config(msgspec.Struct):
    """The fields of config.json."""

    vision_config: _Vision = msgspec.field(default_factory=_Vision)
    image_token_id: int | None = None
    image_token_index: int | None = None  # the same, in some families
    spatial_merge_size: int | None = None
    mm_tokens_per_image: int = 256


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
    image_mean: Triple = CLIP_MEAN
    image_std: Triple = CLIP_STD
    rescale_factor: float = 1 / 255
    resample: int = BICUBIC


class _Shape(NamedTuple):
    side: int  # pixels on a side of the square that becomes one token
    size: PictureSize


class _Kind(NamedTuple):
    """Says how the models of an architecture read pictures."""

    token_id: int  # where config.json is silent
    shape: Callable[[_Config, _Processor], _Shape]
    breaks: tuple[str, str] | None = None  # tokens behind each row, and behind the last one
    written: tuple[str, str] | None = None  # what the chat template writes, and its replacement
    sees_itself: bool = False


def _qwen(default_patch: int) -> Callable[[_Config, _Processor], _Shape]:
    def shape(config: _Config, given: _Processor) -> _Shape:
        patch = config.vision_config.patch_size or default_patch
        merge = config.vision_config.spatial_merge_size or 2
        if (given.patch_size or patch, given.merge_size or merge) != (patch, merge):
            raise ConfigError(
                f"preprocessor_config.json has patches of {given.patch_size} and merges "
                f"{given.merge_size}, but the vision_config of config.json has {patch} and {merge}"
            )
        size = given.size or _Size()
        least = given.min_pixels or size.shortest_edge or MIN_PIXELS
        most = given.max_pixels or size.longest_edge or MAX_PIXELS
        return _Shape(patch * merge, PixelBounds(least, most))

    return shape


def _pixtral(config: _Config, given: _Processor) -> _Shape:
    patch, merge = config.vision_config.patch_size or 14, config.spatial_merge_size or 2
    longest = (given.size or _Size()).longest_edge or LONGEST_EDGE
    return _Shape(patch * merge, LongestEdge(longest))


def _gemma(config: _Config, _given: _Processor) -> _Shape:
    per_side = math.isqrt(config.mm_tokens_per_image)
    return _Shape((config.vision_config.image_size or 896) // per_side, FixedSize(per_side))


KINDS: Mapping[str, _Kind] = {
    "Gemma3ForConditionalGeneration": _Kind(
        262_144,
        _gemma,
        written=(
            "<start_of_image>",
            "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
        ),
        sees_itself=True,
    ),
    "Mistral3ForConditionalGeneration": _Kind(10, _pixtral, breaks=("[IMG_BREAK]", "[IMG_END]")),
    "Qwen2VLForConditionalGeneration": _Kind(151_655, _qwen(14)),
    "Qwen2_5_VLForConditionalGeneration": _Kind(151_655, _qwen(14)),
    "Qwen3VLForConditionalGeneration": _Kind(151_655, _qwen(16)),
    "Qwen3_5ForConditionalGeneration": _Kind(248_056, _qwen(16)),
    "Qwen3_5MoeForConditionalGeneration": _Kind(248_056, _qwen(16)),
}

TokenId: TypeAlias = Callable[[str], int | None]


class PictureSettings(Record, frozen=True):
    """`breaks` are the ids of the tokens behind each row of a picture, and behind its last one."""

    token_id: int  # that stands once for each picture in a chat's prompt
    side: int  # pixels on a side of the square that becomes one token
    size: PictureSize
    scale: PixelScale
    resample: int = BICUBIC  # of PIL.Image.Resampling
    breaks: tuple[int, int] | None = None
    written: tuple[str, str] | None = None  # what the chat template writes, and its replacement
    sees_itself: bool = False  # tokens of a picture see each other

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
    own = _read(config, _Config, f"{where}/config.json")
    given = _read(processor, _Processor, f"{where}/preprocessor_config.json")
    try:
        shape = kind.shape(own, given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    stated = (own.image_token_id, own.image_token_index, kind.token_id)
    return PictureSettings(
        next(number for number in stated if number is not None),
        shape.side,
        shape.size,
        PixelScale(given.rescale_factor, given.image_mean, given.image_std),
        given.resample,
        None if kind.breaks is None else _ids_of(kind.breaks, token_id, where),
        kind.written,
        kind.sees_itself,
    )


def _read(values: Mapping[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None


def _ids_of(names: tuple[str, str], token_id: TokenId, where: str) -> tuple[int, int]:
    first, last = (token_id(name) for name in names)
    if first is None or last is None:
        raise ConfigError(f"{where}: its tokenizer lacks one of {', '.join(names)}, of pictures")
    return first, last
