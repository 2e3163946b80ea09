"""A target with a second model beside it: a draft of one layer with KV pools of its own.

The target's logits depend on its first layer alone, so a drafter that has this layer, and whose own
KV is right, guesses every token. Its guesses show in how many steps a request takes.
"""

from __future__ import annotations

from torch import Tensor

from aserve.gpu.models.base import Attend
from tests.fakes.hash_model import HEAD_DIM, NUM_HEADS, HashModel

FIRST_READ = NUM_HEADS * HEAD_DIM  # features of the first layer


class ShallowTarget(HashModel):
    """Two layers, of which the head reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self._head[FIRST_READ:] = 0


class OneLayerDraft(HashModel):
    """The first layer of ShallowTarget, and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.layers[:1]
        self._head = self._head[:FIRST_READ]

    def forward(  # type: ignore[override]  # a drafter takes hidden states instead of a capture
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, hidden: Tensor | None = None
    ) -> Tensor:
        return super().forward(input_ids, positions, attend)
