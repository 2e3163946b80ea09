"""The formats in which rows travel to their experts: as they are, or in eight bits.

In eight bits a row has one scale for each 128 channels, as DeepEP's low-latency mode sends it:

    scale = max|x| / 448,    q = float8_e4m3(x / scale),    x' = q scale

448 is the largest number of e4m3, which has three bits of mantissa, so |x' - x| is at most |x| / 16
or, of the smallest numbers, scale / 1024. Source: https://github.com/deepseek-ai/DeepEP
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aserve.errors import BugError

CHANNELS = 128  # that share a scale
LARGEST = 448.0
SMALLEST_MAX = 1e-4  # as in DeepEP: a row of zeros has a scale, too
FP8 = torch.float8_e4m3fn


class RowFormat(Protocol):
    """Rows are encoded before they travel, and decoded where they arrive."""

    def encode(self, x: Tensor, /) -> tuple[Tensor, ...]:
        """x [tokens, hidden] -> the tensors that travel, each [tokens, ...]."""

    def decode(self, sent: tuple[Tensor, ...], dtype: torch.dtype, /) -> Tensor:
        """-> [rows, hidden] of the dtype. Rows of zero bytes become zeros."""


class PlainRows:
    def encode(self, x: Tensor, /) -> tuple[Tensor, ...]:
        return (x,)

    def decode(self, sent: tuple[Tensor, ...], dtype: torch.dtype, /) -> Tensor:
        (x,) = sent
        return x.to(dtype)


class Fp8Rows:
    def encode(self, x: Tensor, /) -> tuple[Tensor, ...]:
        """The values are bytes, because torch cannot index numbers of eight bits everywhere."""
        num_tokens, hidden = x.shape
        if hidden % CHANNELS:
            raise BugError(
                f"rows of {hidden} in eight bits; their size is a multiple of {CHANNELS}"
            )
        groups = x.float().view(num_tokens, hidden // CHANNELS, CHANNELS)
        scales = groups.abs().amax(dim=2).clamp(min=SMALLEST_MAX) / LARGEST
        values = (groups / scales[:, :, None]).to(FP8).view(num_tokens, hidden)
        return values.view(torch.uint8), scales

    def decode(self, sent: tuple[Tensor, ...], dtype: torch.dtype, /) -> Tensor:
        values, scales = sent
        groups = values.view(FP8).float().view(*scales.shape, CHANNELS)
        return (groups * scales[:, :, None]).view(values.shape).to(dtype)


PLAIN_ROWS = PlainRows()
FP8_ROWS = Fp8Rows()
