"""The protocol of what runs some forwards in fewer calls than the model itself takes.

It knows no step and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from aserve.gpu.forward_batch import ForwardBatch
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.causal_model import CausalModel


class Shortcut(Protocol):
    def can_run(self, batch: ForwardBatch) -> bool: ...

    def run(self, batch: ForwardBatch) -> Tensor:
        """As `CausalModel.forward` with attention over the batch's KV: stores keys and values ->
        hidden states after the norm [tokens, hidden]."""


MakeShortcut: TypeAlias = Callable[[CausalModel, KvPools], Shortcut | None]  # None: it has none
