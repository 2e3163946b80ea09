"""The parts of sampling that go over whole rows of logits, which a device may make in a way of its
own.

It knows no device. Each way gives the same tokens, but where float32's last digits decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.sampling.draw import Drawn, draw_tokens
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.penalties import penalise
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.sampling.token_masks import allow
from aserve.gpu.sampling.top_k_top_p import choose_sorted

# As `draw_tokens`, `penalise` and `allow`.
Draw: TypeAlias = Callable[[Tensor, LogitsRows, RowTables, SamplePlan], Drawn]
Penalise: TypeAlias = Callable[[Tensor, Tensor, LogitsRows, RowTables, KvPools, int], None]
Allow: TypeAlias = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class SampleOps:
    """`filters_by_shape`: drawing with top-k, top-p or min-p calls the same operators whatever the
    logits are, so that it can be captured. `reads_halves`: drawing reads logits of 16 bits as they
    are."""

    draw: Draw = draw_tokens
    penalise: Penalise = penalise
    allow: Allow = allow
    filters_by_shape: bool = False
    reads_halves: bool = False


PLAIN_OPS = SampleOps()
SHAPED_OPS = SampleOps(draw=partial(draw_tokens, by=choose_sorted), filters_by_shape=True)
