"""Weights in MXFP4, as the published checkpoints of gpt-oss have the matrices of their experts.

A tensor w [experts, in, out] is stored by its columns, in groups of 32 elements with one scale:

    NAME_blocks  uint8 [experts, out, in / 32, 16], two elements per byte, the lower bits first
    NAME_scales  uint8 [experts, out, in / 32]
    w[e, i, o] = VALUES[element i % 32 of group i // 32] * 2^(scale - 127)

Source: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf;
integrations/mxfp4.py in transformers
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
BYTES = GROUP // 2  # of a group
BIAS = 127  # of exponents
HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*HALF, *(-value for value in HALF))  # by sign, exponent and mantissa

Shape = tuple[int, ...]


def whole_shape(blocks: Shape, scales: Shape) -> Shape | None:
    """Returns the shape of w, or None where blocks and scales don't belong together."""
    if len(blocks) != 4 or blocks[-1] != BYTES or scales != blocks[:-1]:
        return None
    experts, num_out, num_groups, _ = blocks
    return experts, num_groups * GROUP, num_out


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns w in bfloat16, which holds each value exactly."""
    pairs = torch.tensor(VALUES, dtype=torch.bfloat16, device=blocks.device)
    bytes_to_pair = torch.stack(
        (pairs.repeat(len(pairs)), pairs.repeat_interleave(len(pairs))), dim=1
    )
    shape = whole_shape(tuple(blocks.shape), tuple(scales.shape))
    assert shape is not None
    out = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    for own, block, scale in zip(out, blocks, scales, strict=True):
        elements = bytes_to_pair[block.int()].flatten(2)  # [out, groups, 32]
        exponents = (scale.int() - BIAS)[:, :, None]
        own.copy_(torch.ldexp(elements.float(), exponents).flatten(1).T)
    return out
