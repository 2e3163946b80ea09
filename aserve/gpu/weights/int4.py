"""Linear layers of 4 bits, as the checkpoints of AWQ, GPTQ and compressed-tensors have them.

    w[o, i] = scale[o, g(i)] * (q[o, i] - zero[o, g(i)]),  q and zero from 0 to 15

They are stored in these tensors; an int32 word has eight values:

    awq                 NAME.qweight [in, out / 8], NAME.qzeros [groups, out / 8], both with the
                        outputs of a word in the order 0, 2, 4, 6, 1, 3, 5, 7;
                        NAME.scales [groups, out]
    gptq                NAME.qweight [in / 8, out], NAME.qzeros [groups, out / 8] less 1,
                        NAME.scales [groups, out], NAME.g_idx [in], which is g
    gptq_v2             the same, with zeros as they are
    compressed-tensors  NAME.weight_packed [out, in / 8], NAME.weight_scale [out, groups],
                        NAME.weight_zero_point [out / 8, groups], without which zeros are 8

g(i) is i // (in / groups) where nothing else is said.

Source: gemm_pack_utils of AutoAWQ; qlinear of AutoGPTQ and GPTQModel, whose checkpoint_format is
gptq or gptq_v2; the pack-quantized format of compressed-tensors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from aserve.errors import ConfigError

Method = Literal["awq", "gptq", "gptq_v2", "compressed-tensors"]
Shape = tuple[int, ...]

BITS, PER_WORD = 4, 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each value of a word has
IN_ORDER = tuple(range(PER_WORD))
MIDDLE = 8  # the zero of symmetric weights; codes are values less this


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight of 4 or 8 bits: scales * codes + offsets, of groups of neighbouring inputs."""

    codes: Tensor  # int8 [out, in]; those of 4 bits are from -8 to 7
    scales: Tensor  # float32 [out, groups]
    offsets: Tensor  # float32 [out, groups], or [out, 0]: there are none
    bits: int = BITS

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """The inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def widened(self) -> Tensor:
        """Returns the weight, float32 [out, in]."""
        groups = self.codes.view(len(self.codes), self.scales.shape[1], -1)
        wide = groups * self.scales[:, :, None]
        return (wide + self.offsets[:, :, None] if self.offsets.numel() else wide).flatten(1)

    def part(self, part: tuple[slice, ...]) -> CodedWeight | None:
        """Returns these elements of the weight, or None where they cut a group."""
        rows, columns = part
        if columns.start % self.group or columns.stop % self.group:
            return None
        groups = slice(columns.start // self.group, columns.stop // self.group)
        return CodedWeight(
            self.codes[part].contiguous(),
            self.scales[rows, groups],
            self.offsets[rows, groups],
            self.bits,
        )


def joined(parts: Sequence[CodedWeight]) -> CodedWeight | None:
    """Joins the rows of several weights; None if their bits or groups differ."""
    if len({(part.bits, part.scales.shape[1]) for part in parts}) > 1:
        return None
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.scales for part in parts])
    offsets = [part.offsets for part in parts]
    if any(own.numel() for own in offsets):
        offsets = [
            own if own.numel() else torch.zeros_like(part.scales)
            for own, part in zip(offsets, parts, strict=True)
        ]
    return CodedWeight(codes, scales, torch.cat(offsets), parts[0].bits)


@dataclass(frozen=True, slots=True)
class Names:
    """The suffixes of a layer's tensors."""

    values: str
    zeros: str
    scales: str
    group_of: str = ""


OLD = Names(".qweight", ".qzeros", ".scales", ".g_idx")
NEW = Names(".weight_packed", ".weight_zero_point", ".weight_scale", ".weight_g_idx")
NAMES: Mapping[Method, Names] = {"awq": OLD, "gptq": OLD, "gptq_v2": OLD, "compressed-tensors": NEW}
INT4 = "int4"  # the name of this format for devices
IGNORED = ".weight_shape"  # of compressed-tensors, whose values the other tensors say


def whole_shape(method: Method, values: Shape, scales: Shape) -> Shape | None:
    """Returns the shape [out, in] of a weight, or None where its tensors don't belong together."""
    if len(values) != 2 or len(scales) != 2:
        return None
    if method == "awq":
        shape, groups = (values[1] * PER_WORD, values[0]), scales[::-1]
    elif method == "compressed-tensors":
        shape, groups = (values[0], values[1] * PER_WORD), scales
    else:
        shape, groups = (values[1], values[0] * PER_WORD), scales[::-1]
    fits = groups[0] == shape[0] and groups[1] and shape[1] % groups[1] == 0
    return shape if fits else None


def read_coded(method: Method, read: Callable[[str], Tensor | None]) -> tuple[CodedWeight, Tensor]:
    """Reads the tensors of a layer, by their suffixes. Returns the weight, with inputs that are
    sorted by their groups, and where each input of the layer stands there, int64 [in]. Raises
    ConfigError.
    """
    names = NAMES[method]
    values, scales, zeros = (read(name) for name in (names.values, names.scales, names.zeros))
    assert values is not None
    assert scales is not None
    if method == "compressed-tensors":
        codes = _unpacked(values, IN_ORDER)
        zero = None if zeros is None else _unpacked(zeros.T, IN_ORDER).T
    elif method == "awq":
        codes, scales = _unpacked(values, AWQ_ORDER).T, scales.T
        zero = None if zeros is None else _unpacked(zeros, AWQ_ORDER).T
    else:
        codes, scales = _unpacked(values.T, IN_ORDER), scales.T
        zero = None if zeros is None else _unpacked(zeros, IN_ORDER).T + (method == "gptq")
    wide = scales.float()
    if zero is not None and zero.shape != wide.shape:
        raise ConfigError(f"zeros of {tuple(zero.shape)} do not fit scales of {tuple(wide.shape)}")
    offsets = torch.zeros_like(wide) if zero is None else (MIDDLE - zero) * wide
    codes = (codes - MIDDLE).to(torch.int8)
    group_of = read(names.group_of)
    order = torch.arange(codes.shape[1], device=codes.device)
    if group_of is not None:
        numbers, order = torch.sort(group_of.long(), stable=True)
        num_groups = wide.shape[1]
        in_order = torch.arange(len(order), device=order.device) // (len(order) // num_groups)
        if not torch.equal(numbers, in_order):
            raise ConfigError(f"{names.group_of} does not name {num_groups} groups of equal sizes")
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return CodedWeight(codes[:, order].contiguous(), wide, offsets), places


def _unpacked(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """words int32 [rows, n] -> [rows, 8 n]: value j of a word goes to place order[j]."""
    shifts = torch.empty(PER_WORD, dtype=torch.int32)
    shifts[torch.tensor(order)] = BITS * torch.arange(PER_WORD, dtype=torch.int32)
    return ((words[:, :, None] >> shifts.to(words.device)) & 15).flatten(1)
