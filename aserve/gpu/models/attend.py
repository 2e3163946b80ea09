"""How a model reaches its KV: one callable, bound to one forward.

It knows no pages, rows or batches: whoever binds it does.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from aserve.gpu.models.layer_spec import LayerSpec


class Attend(Protocol):
    """Stores k and v of this forward's tokens in the layer's KV, then attends to all that each
    token may see."""

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> like q.

        They may have any strides: they are views of the layer's joined projection.
        """
