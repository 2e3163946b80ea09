"""What keys and values of a layer were divided by where a checkpoint was made for KV in eight bits.

It knows no family: quantisers agree on the names well enough.
"""

from __future__ import annotations

from aserve.gpu.kv.stored import Scales
from aserve.gpu.weights.source import WeightSource


def kv_scales(weights: WeightSource, layer: int) -> Scales:
    """1 where the checkpoint says nothing."""
    prefix = f"model.layers.{layer}.self_attn"
    of_keys, of_values = (
        weights.number(
            (f"{prefix}.{x}_scale", f"{prefix}.attn.{x}_scale", f"{prefix}.{x}_proj.{x}_scale"),
            default=1.0,
        )
        for x in ("k", "v")
    )
    return of_keys, of_values
