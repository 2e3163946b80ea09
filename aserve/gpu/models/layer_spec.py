"""What attention and the KV pools must know of one layer.

It knows nothing of the model that the layer belongs to.
"""

from __future__ import annotations

import msgspec


class LayerSpec(msgspec.Struct, frozen=True):
    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of q k^T, before the softmax
    window: int | None = (
        None  # a query sees the last `window` positions, itself included; None: all
    )
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    kv_scales: tuple[float, float] = (1.0, 1.0)  # of keys and values that lie in eight bits
