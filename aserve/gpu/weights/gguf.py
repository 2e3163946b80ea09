"""Reads the tensors of a GGUF file, by the table in its model directory (aserve/gguf/table.py).

A tensor in blocks is read as float32, or as a weight of 4 bits where the blocks are such: with one
scale, and maybe one offset, for each 32 inputs. Others become weights of 8 bits, with a scale for
each output.

Source: ggml-quants.h of ggml; the package gguf widens blocks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gguf.families import RowOrder
from aserve.gguf.table import GgufTensor, file_name, read_table
from aserve.gpu.weights.int4 import BITS, MIDDLE, CodedWeight
from aserve.gpu.weights.mxfp4 import Mxfp4Weight
from aserve.gpu.weights.quantized import StoredBits, rounded

Bytes = npt.NDArray[np.uint8]
Coded = tuple[Tensor, Tensor, Tensor]  # codes, scales and offsets of a `CodedWeight`
Part = tuple[slice, ...]

NUMBERS: Mapping[GGMLQuantizationType, tuple[str, torch.dtype]] = {
    GGMLQuantizationType.F32: ("F32", torch.float32),
    GGMLQuantizationType.F16: ("F16", torch.float16),
    GGMLQuantizationType.BF16: ("BF16", torch.bfloat16),
}
GROUP = 32  # the inputs that share a scale in blocks of 4 bits
PIECE = 1 << 22  # weights that one thread widens at a time


class GgufFile:
    """One file of a model, as a `Checkpoint` reads it. Names are those of the table."""

    __slots__ = ("_bytes", "_device", "_tensors")

    def __init__(self, path: Path, device: torch.device) -> None:
        table = read_table(path.parent)
        if table is None:
            raise ConfigError(f"{path.parent} has no table of the tensors in {path.name}")
        names = [file_name(number) for number in range(table.num_files)]
        number = names.index(path.name)
        self._tensors = {name: own for name, own in table.tensors.items() if own.file == number}
        self._bytes: Bytes = np.memmap(path, np.uint8, "r")
        self._device = device
        if any(own.at + own.size > len(self._bytes) for own in self._tensors.values()):
            raise OSError("it was cut off")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        return [*self._tensors]

    def get_slice(self, name: str) -> GgufSlice:
        return GgufSlice(self._tensors[name], self._bytes, self._device)

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[()]


class GgufSlice:
    """One tensor, of which parts can be read."""

    __slots__ = ("_device", "_kind", "_rows", "_tensor")

    def __init__(self, tensor: GgufTensor, file: Bytes, device: torch.device) -> None:
        own = file[tensor.at : tensor.at + tensor.size]
        self._rows = own.reshape(tensor.shape[0], -1)
        self._kind = GGMLQuantizationType(tensor.kind)
        self._tensor = tensor
        self._device = device

    def get_shape(self) -> list[int]:
        return [*self._tensor.shape]

    def get_dtype(self) -> str:
        """Returns the dtype that is read."""
        return NUMBERS[self._kind][0] if self._kind in NUMBERS else "F32"

    @property
    def bits(self) -> StoredBits | None:
        """The bits of its codes, None if it is stored as numbers."""
        if self._kind in NUMBERS:
            return None
        if self._kind == GGMLQuantizationType.MXFP4:
            return StoredBits(BITS, GROUP)
        return StoredBits(BITS, GROUP) if self._kind in FOUR_BITS else StoredBits(8)

    def __getitem__(self, part: tuple[int | slice, ...]) -> Tensor:
        tensor, rows, columns = self._tensor, part[:1], part[1:]
        stored = self._stored(*rows)
        if self._kind in NUMBERS:
            values = torch.from_numpy(stored).view(NUMBERS[self._kind][1])
        else:
            values = _widened(stored, self._kind)
        values = values.reshape(-1, *tensor.shape[1:])
        if tensor.has_columns and tensor.order is not None:
            values = values[:, _places(tensor.order, tensor.shape[1])]
        values = values[(slice(None), *columns)].to(self._device)
        if tensor.is_decay:
            return torch.log(-values)
        return values + tensor.offset if tensor.offset else values

    def coded(self, part: Part) -> CodedWeight | Mxfp4Weight | None:
        """Returns these elements [out, in] of a tensor in blocks as codes, or None where they cut a
        group."""
        if self.bits is None:
            return None
        rows, columns = part
        if self._kind == GGMLQuantizationType.MXFP4:
            whole_rows = _mxfp4(torch.from_numpy(self._stored(rows)).to(self._device))
            return whole_rows.part((slice(0, len(whole_rows.blocks)), columns))
        if self._kind not in FOUR_BITS:
            return rounded(self[part], 8)
        blocks = torch.from_numpy(self._stored(rows)).to(self._device)
        num_rows, size = len(blocks), GGML_QUANT_SIZES[self._kind][1]
        codes, scales, offsets = FOUR_BITS[self._kind](blocks.view(-1, size))
        num_groups = scales.numel() // num_rows
        whole = CodedWeight(
            codes.view(num_rows, -1),
            scales.view(num_rows, num_groups),
            offsets.view(num_rows, num_groups if offsets.numel() else 0),
        )
        order = self._tensor.order if self._tensor.has_columns else None
        if order is not None:
            if order.inner % GROUP:
                return None
            groups = msgspec.structs.replace(order, inner=order.inner // GROUP)
            by_group = _places(groups, whole.scales.shape[1])
            whole = CodedWeight(
                whole.codes[:, _places(order, whole.codes.shape[1])],
                whole.scales[:, by_group],
                whole.offsets[:, by_group] if whole.offsets.numel() else whole.offsets,
            )
        return whole.part((slice(0, num_rows), columns))

    def _stored(self, rows: int | slice = slice(None)) -> Bytes:
        """Returns the bytes of these rows of the model's tensor."""
        tensor = self._tensor
        if tensor.order is None or tensor.has_columns:
            return np.array(self._rows[rows])
        return self._rows[_places(tensor.order, len(self._rows))[rows]]


def _places(order: RowOrder, count: int) -> npt.NDArray[np.int64]:
    """Returns where the file has each of `count` rows (or columns) of the model."""
    places = np.arange(count)
    sizes = (order.outer, order.left, order.right, order.inner)
    places[order.first :] = places[order.first :].reshape(sizes).swapaxes(1, 2).ravel()
    return places


def _widened(stored: Bytes, kind: GGMLQuantizationType) -> Tensor:
    """stored [rows, bytes] -> float32 [rows, columns]."""
    num_weights, num_bytes = GGML_QUANT_SIZES[kind]
    step = max(1, PIECE // (stored.shape[1] // num_bytes * num_weights))
    pieces = [stored[at : at + step] for at in range(0, len(stored), step)]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        wide = [*threads.map(lambda piece: _dequantized(piece, kind), pieces)]
    return torch.from_numpy(np.concatenate(wide))


def _dequantized(stored: Bytes, kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    try:
        return dequantize(stored, kind)
    except NotImplementedError:
        raise OSError(f"tensors of the type {kind.name} are not read") from None


def _q4_0(blocks: Tensor) -> Coded:
    """A scale, and 32 codes from 0 to 15, of which 8 is zero."""
    scales = blocks[:, :2].view(torch.float16).float()
    return _halves(blocks[:, 2:]), scales, scales[:, :0]


def _q4_1(blocks: Tensor) -> Coded:
    """A scale and an offset, and 32 codes."""
    scales, offsets = blocks[:, :4].view(torch.float16).float().split(1, dim=1)
    return _halves(blocks[:, 4:]), scales, offsets + MIDDLE * scales


def _q4_k(blocks: Tensor) -> Coded:
    """256 codes in groups of 32. The scales and offsets of the groups are integers of 6 bits, times
    the two of the block."""
    large = blocks[:, :4].view(torch.float16).float()
    low, middle, high = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat([low & 63, (high & 15) | (low >> 2 & 48)], dim=1)
    offsets = torch.cat([middle & 63, (high >> 4) | (middle >> 2 & 48)], dim=1)
    codes = _halves(blocks[:, 16:].reshape(-1, GROUP)).view(len(blocks), -1)
    scales = large[:, :1] * scales
    return codes, scales, MIDDLE * scales - large[:, 1:] * offsets


def _mxfp4(rows: Tensor) -> Mxfp4Weight:
    """rows [out, bytes] of blocks: an exponent, and 32 elements, of which the first half are the
    low parts of the words."""
    blocks = rows.view(len(rows), -1, 1 + GROUP // 2)
    words = blocks[:, :, 1:]
    in_order = torch.cat([words & 15, words >> 4], dim=2)
    return Mxfp4Weight(in_order[:, :, ::2] | in_order[:, :, 1::2] << 4, blocks[:, :, 0])


def _halves(words: Tensor) -> Tensor:
    """words [n, k] of two codes each -> int8 [n, 2 k], less MIDDLE: the low halves, then the high
    ones."""
    return torch.cat([words & 15, words >> 4], dim=1).to(torch.int8) - MIDDLE


FOUR_BITS: Mapping[GGMLQuantizationType, Callable[[Tensor], Coded]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
}
