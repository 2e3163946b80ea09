"""The operators of sampling that a device may replace by its own kernels.

These are the operators that go over whole rows of logits. Every implementation gives the same
tokens, except where the last digits of float32 decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.sampling.draw import draw_tokens
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.penalties import penalise
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.sampling.token_masks import allow
from aserve.gpu.sampling.top_k_top_p import choose_sorted

# The signatures of `draw_tokens`, `penalise` and `allow`.
Draw: TypeAlias = Callable[[Tensor, LogitsRows, RowTables, SamplePlan], tuple[Tensor, Tensor]]
Penalise: TypeAlias = Callable[[Tensor, Tensor, LogitsRows, RowTables, KvPools, int], None]
Allow: TypeAlias = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class SampleOps:
    """The sampling operators of one device and dtype; each default is the torch reference."""

    draw: Draw = draw_tokens
    penalise: Penalise = penalise
    allow: Allow = allow
    # Whether drawing with top-k, top-p or min-p runs the same operators whatever the logits are, so
    # that a CUDA graph can capture it.
    filters_by_shape: bool = False
    reads_16_bit_logits: bool = False  # whether `draw` accepts 16-bit logits


PLAIN_OPS = SampleOps()
SHAPED_OPS = SampleOps(draw=partial(draw_tokens, by=choose_sorted), filters_by_shape=True)
