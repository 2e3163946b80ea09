"""Random adapters of one linear layer, and tokens that use them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aserve_kernels.lora import LoraStack


class Shape(NamedTuple):
    num_slots: int
    rank: int
    num_in: int
    sizes: tuple[int, ...]  # outputs of each part


SHAPES = (
    Shape(2, 1, 2, (1,)),
    Shape(4, 5, 48, (32, 16, 16)),
    Shape(3, 16, 257, (300, 211)),
)


@dataclass
class Case:
    y: Tensor
    x: Tensor
    slots: Tensor
    stack: LoraStack

    def stack_as(self, dtype: torch.dtype) -> LoraStack:
        return replace(self.stack, a=self.stack.a.to(dtype), b=self.stack.b.to(dtype))


def draw_case(shape: Shape, num_tokens: int, dtype: torch.dtype) -> Case:
    """The ranks of the slots differ, and the last part of slot 1 has no adapter."""
    generator = torch.Generator().manual_seed(sum(shape[:3]))

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    num_slots, rank, num_in, sizes = shape
    bounds = np.cumsum([0, *sizes], dtype=np.int64)
    ranks = np.full((num_slots, len(sizes)), rank, np.int64)
    ranks[0] = 0
    ranks[-1] = max(1, rank - 2)
    if len(sizes) > 1:
        ranks[1, -1] = 0
    a = draw(num_slots, len(sizes), rank, num_in) / num_in**0.5
    b = draw(num_slots, rank, int(bounds[-1])) / rank**0.5
    for slot in range(num_slots):
        for part, used in enumerate(ranks[slot]):
            a[slot, part, used:] = 0
            b[slot, used:, bounds[part] : bounds[part + 1]] = 0
    part_of = torch.from_numpy(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    stack = LoraStack(a.to(dtype), b.to(dtype), ranks, part_of, bounds)
    slots = torch.arange(num_tokens) % num_slots
    y, x = draw(num_tokens, int(bounds[-1])).to(dtype), draw(num_tokens, num_in).to(dtype)
    return Case(y, x, slots, stack)
