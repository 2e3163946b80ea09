"""How a model reaches its KV: one callable, bound to one forward.

It knows no pages, rows or batches: whoever binds it does.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from aserve.gpu.layers.rotary import Turn
from aserve.gpu.models.layer_spec import LayerSpec


class Attend(Protocol):
    """Turns queries and keys, stores keys and values of this forward's tokens in the layer's KV,
    then attends to all that each token may see."""

    def __call__(self, layer: LayerSpec, heads: Tensor, turn: Turn | None, /) -> Tensor:
        """heads [tokens, heads + 2 * kv_heads, head_dim]: queries, keys and values, of any strides,
        as the layer's joined projection gives them -> [tokens, heads, head_dim]. Without a turn
        they are taken as they are.
        """
