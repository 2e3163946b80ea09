"""Linear layers in fp8 (E4M3), as checkpoints in fp8 and of compressed-tensors have them.

    w[o, i] = element[o, i] * scale[o // rows, i // columns]        in float32

    NAME.weight            float8_e4m3fn [out, in]
    NAME.weight_scale_inv  or NAME.weight_scale: one number; one for each output, [out] or [out, 1];
                           or one for each block of `rows` and `columns`, rounded up
    NAME.input_scale       one number, where the scale of activations is not computed in each step

Source: the finegrained_fp8 quantizer of transformers; the format float-quantized of
compressed-tensors
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from aserve.errors import ConfigError

ELEMENT = torch.float8_e4m3fn
NAME = "F8_E4M3"  # in a file's header
SCALES = ("_scale_inv", "_scale")  # suffixes of a weight's name
WEIGHT, INPUT_SCALE = ".weight", ".input_scale"
FP8 = "fp8"  # the name of this format for devices
LARGEST = torch.finfo(ELEMENT).max
PART = 4096  # outputs that are rounded at a time, which bounds the float32 copy

Block: TypeAlias = tuple[int, int]  # rows and columns of a block with one scale
Part: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Fp8:
    """The fp8 format of a checkpoint. Without `block` a scale is for a weight or for each row."""

    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in fp8, or a part of one that has whole blocks."""

    elements: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out / rows, in / columns], rounded up
    block: Block
    input_scale: Tensor | None = None  # float32 [1], of the activations

    @property
    def shape(self) -> torch.Size:
        return self.elements.shape

    def widened(self) -> Tensor:
        """Returns the weight, float32 [out, in]."""
        return widened(self.elements, self.scales, whole(self.elements.shape), self.block)


@dataclass(frozen=True, slots=True)
class Fp8Scales:
    """The scales of a stored weight: where they are, and how they are laid out."""

    shape: tuple[int, int]  # of the weight
    block: Block
    values: Tensor
    input_scale: Tensor | None

    def widened(self, elements: Tensor, part: Part) -> Tensor:
        return widened(elements, self._table, part, self.block)

    def weight(self, elements: Tensor, part: Part) -> Fp8Weight | None:
        """Returns elements that are `part` of the weight with their scales; None where they cut a
        block."""
        sides = zip(part, self.shape, self.block, strict=True)
        blocks = [_blocks_of(own, size, block) for own, size, block in sides]
        if None in blocks:
            return None
        rows, columns = blocks
        scales = self._table[rows][:, columns].float().contiguous()
        input_scale = self.input_scale
        if input_scale is not None:
            input_scale = input_scale.float().reshape(1)
        return Fp8Weight(elements, scales, self.block, input_scale)

    @property
    def _table(self) -> Tensor:
        """The scales by blocks. One number is the scale of every row."""
        rows = -(-self.shape[0] // self.block[0])
        return (
            self.values.reshape(-1, 1).expand(rows, 1)
            if _is_one(self.values)
            else (self.values.reshape(rows, -1))
        )


def block_of(shape: tuple[int, ...], scales: tuple[int, ...], given: Block | None) -> Block:
    """Returns the block of a weight [out, in] from the shape of its scales. Raises ConfigError."""
    blocks = () if given is None else tuple(-(-n // b) for n, b in zip(shape, given, strict=False))
    if given is not None and scales == blocks:
        return given
    is_one, is_by_row = math.prod(scales) == 1, scales in (shape[:1], (*shape[:1], 1))
    if len(shape) == 2 and (is_one or is_by_row):
        return (1, shape[1])
    expected = f"{blocks}, one scale per block of {given}" if given else "one scale, or one per row"
    raise ConfigError(f"has the shape {scales}; expected {expected}")


def widened(elements: Tensor, scales: Tensor, part: Part, block: Block) -> Tensor:
    """elements [rows, columns], the elements `part` of a weight, and the scales of the blocks of
    the whole weight -> float32 [rows, columns]."""
    rows, columns = (
        torch.arange(own.start, own.stop, device=scales.device) // size
        for own, size in zip(part, block, strict=True)
    )
    return elements.to(torch.float32) * scales.to(torch.float32)[rows][:, columns]


def whole(shape: Sequence[int]) -> Part:
    return tuple(slice(0, size) for size in shape)


def joined(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Joins the rows of several weights; None if their blocks differ, or would not follow one
    another. The joined layer quantises its input once, with the largest of the parts' scales."""
    block = parts[0].block
    if any(part.block != block for part in parts):
        return None
    if any(len(part.elements) % block[0] for part in parts[:-1]):
        return None
    given = [part.input_scale for part in parts if part.input_scale is not None]
    input_scale = torch.stack(given).amax(dim=0) if len(given) == len(parts) else None
    elements = torch.cat([part.elements.view(torch.uint8) for part in parts]).view(ELEMENT)
    return Fp8Weight(elements, torch.cat([part.scales for part in parts]), block, input_scale)


def rounded_to_fp8(weight: Tensor) -> Fp8Weight:
    """weight [out, in], of any floating dtype -> the same with a scale per output,
    max |w| / 448."""
    largest = weight.abs().amax(dim=1, keepdim=True).float()
    scales = torch.where(largest > 0, largest / LARGEST, 1)
    elements = torch.empty(weight.shape, dtype=ELEMENT, device=weight.device)
    for at in range(0, len(weight), PART):
        own = slice(at, at + PART)
        elements[own] = (weight[own].float() / scales[own]).clamp_(-LARGEST, LARGEST).to(ELEMENT)
    return Fp8Weight(elements, scales, (1, weight.shape[1]))


def _is_one(values: Tensor) -> bool:
    return values.numel() == 1


def _blocks_of(own: slice, size: int, block: int) -> slice | None:
    """Returns the blocks that a slice of a side has, or None where it cuts one."""
    if block >= size:
        return slice(0, 1)
    if own.start % block or (own.stop % block and own.stop != size):
        return None
    return slice(own.start // block, -(-own.stop // block))
