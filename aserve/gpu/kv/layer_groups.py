"""What attention and the KV pools must know of one layer.

It knows nothing of the model that the layer belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from aserve.cache.layout import GroupLayout
from aserve.errors import ConfigError


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


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` may be empty in the first group, which always exists: token ids have its pages."""

    window: int | None
    layers: tuple[LayerSpec, ...]

    @property
    def name(self) -> str:
        return "full" if self.window is None else f"window-{self.window}"

    def layout(self, dtype_bytes: int) -> GroupLayout:
        shapes = {(layer.num_kv_heads, layer.head_dim) for layer in self.layers}
        if len(shapes) > 1:
            raise ConfigError(
                f"layers of group {self.name} differ in KV heads and head size: {sorted(shapes)}"
            )
        num_kv_heads, head_dim = next(iter(shapes), (0, 0))
        return GroupLayout(
            name=self.name,
            window=self.window,
            num_layers=len(self.layers),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype_bytes=dtype_bytes,
        )


def group_layers(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    windows = sorted({layer.window for layer in layers if layer.window is not None})
    return tuple(
        LayerGroup(window, tuple(layer for layer in layers if layer.window == window))
        for window in (None, *windows)
    )
