"""Weights in MXFP4, as the published checkpoints of gpt-oss have the matrices of their experts.

The matrices W [out, in] of all experts are one tensor, in groups of 32 inputs with one scale:

    NAME_blocks  uint8 [experts, out, in / 32, 16], two elements per byte, the lower bits first
    NAME_scales  uint8 [experts, out, in / 32]
    W[o, i] = VALUES[element i % 32 of group i // 32] * 2^(scale - 127)

An element (E2M1) has a sign, two bits of exponent and one of mantissa.

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf;
integrations/mxfp4.py in transformers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MXFP4 = "mxfp4"  # the name of this format for devices
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
BYTES = GROUP // 2  # of a group
BIAS = 127  # of exponents
HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*HALF, *(-value for value in HALF))  # by sign, exponent and mantissa

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A weight W in MXFP4."""

    blocks: Tensor  # uint8 [out, in / 32, 16]
    exponents: Tensor  # uint8 [out, in / 32]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.blocks), self.blocks.shape[1] * GROUP))

    @property
    def elements(self) -> Tensor:
        """Returns the elements, uint8 [out, in] from 0 to 15."""
        return torch.stack((self.blocks & 15, self.blocks >> 4), dim=3).flatten(1)

    @property
    def scales(self) -> Tensor:
        """Returns the scales, float32 [out, in / 32]."""
        exponents = self.exponents.int() - BIAS
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)

    def widened(self) -> Tensor:
        """Returns the weight, float32 [out, in]. bfloat16 holds each value exactly."""
        values = torch.tensor(VALUES, device=self.blocks.device)[self.elements.int()]
        groups = values.view(*self.exponents.shape, GROUP) * self.scales[:, :, None]
        return groups.flatten(1)

    def part(self, part: tuple[slice, ...]) -> Mxfp4Weight | None:
        """Returns these elements of the weight, or None where they cut a group."""
        rows, columns = part
        if columns.start % GROUP or columns.stop % GROUP:
            return None
        own = (rows, slice(columns.start // GROUP, columns.stop // GROUP))
        return Mxfp4Weight(self.blocks[own].contiguous(), self.exponents[own].contiguous())


def joined(parts: Sequence[Mxfp4Weight]) -> Mxfp4Weight:
    """Joins the rows of several weights."""
    exponents = torch.cat([part.exponents for part in parts])
    return Mxfp4Weight(torch.cat([part.blocks for part in parts]), exponents)


def stack_shape(blocks: Shape, scales: Shape) -> Shape | None:
    """Returns the shape [experts, out, in] of the weights, or None where blocks and scales don't
    belong together."""
    if len(blocks) != 4 or blocks[-1] != BYTES or scales != blocks[:-1]:
        return None
    experts, num_out, num_groups, _ = blocks
    return experts, num_out, num_groups * GROUP
