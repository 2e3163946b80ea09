"""The facts about a model's layers that attention and the KV pools use.

A `LayerSpec` holds the static facts of one layer, by which pools are laid out and a backend is
chosen. `AttentionInputs` are the tensors that the layer passes to attention in one forward. Layers
with the same window form a `LayerGroup`, which shares one page table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec
from torch import Tensor

from aserve.cache.layout import GroupLayout
from aserve.errors import ConfigError
from aserve.gpu.layers.rope import RopeInputs


class Mask(Enum):
    """The keys that a query at position p sees, before windows and tree masks."""

    CAUSAL = "causal"  # those at positions <= p
    BLOCK_CAUSAL = "block-causal"  # those of its own block of `block_len` positions and before
    NONE = "none"  # all keys of its row


class LayerSpec(msgspec.Struct, frozen=True):
    """The static facts of one attention layer.

    By default a layer stores keys and values of its own. With `value_dim` it stores one latent
    vector per token and KV head, as MLA does: the whole vector is the key, and its first
    `value_dim` elements are the value. With `kv_layer` it stores nothing, and reads the KV of that
    layer, which must be of the same group.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of q k^T, before the softmax
    window: int | None = None  # a query sees keys less than this far away; None: no limit
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    kv_scales: tuple[float, float] = (1.0, 1.0)  # of keys and values that are stored in fp8
    mask: Mask = Mask.CAUSAL
    block_len: int = 1  # of Mask.BLOCK_CAUSAL
    value_dim: int | None = None
    expanded_dim: int | None = None  # of latents: elements of a head's key and value that they give
    kv_layer: int | None = None
    has_sinks: bool = False  # `AttentionInputs.sinks`
    index_dim: int = 0  # of a token's index key, where a query sees its `index_top_k` best keys
    index_top_k: int = 0

    @property
    def num_stored_heads(self) -> int:
        """Heads behind the queries in `AttentionInputs.heads`."""
        if self.kv_layer is not None:
            return 0
        return self.num_kv_heads if self.value_dim is not None else 2 * self.num_kv_heads

    @property
    def out_dim(self) -> int:
        """Size of one head of the layer's attention output."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The inputs that one layer passes to attention for the tokens of one forward.

    `heads` holds the query heads, then the heads to be stored: keys and values, latents, or none
    (`LayerSpec.num_stored_heads`). It may have any strides, so that it can be a view of the joined
    projection's output.
    """

    heads: Tensor  # [tokens, num_heads + num_stored_heads, head_dim]
    rope: RopeInputs | None = None  # applied to queries and keys; None: they are used as they are
    sinks: Tensor | None = None  # [num_heads]: a score of each head that joins its softmax


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same window, which share a page table.

    The first group has no window and always exists, because token ids use its pages; its `layers`
    may be empty.
    """

    window: int | None
    layers: tuple[LayerSpec, ...]

    @property
    def name(self) -> str:
        return "full" if self.window is None else f"window-{self.window}"

    @property
    def storing_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that have KV of their own."""
        return tuple(layer for layer in self.layers if layer.kv_layer is None)

    def layout(self, dtype_bytes: int) -> GroupLayout:
        layers = self.storing_layers
        shapes = {(layer.num_kv_heads, layer.head_dim, layer.value_dim or 0) for layer in layers}
        if len(shapes) > 1:
            raise ConfigError(
                f"the layers of group {self.name} must store KV of one shape, but have "
                f"(KV heads, head size, value size of a latent) {sorted(shapes)}"
            )
        num_kv_heads, head_dim, value_dim = next(iter(shapes), (0, 0, 0))
        return GroupLayout(
            name=self.name,
            window=self.window,
            num_layers=len(layers),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype_bytes=dtype_bytes,
            is_latent=value_dim > 0,
        )


def group_layers(layers: tuple[LayerSpec, ...]) -> tuple[LayerGroup, ...]:
    """The group without a window comes first, then one per window size in ascending order."""
    windows = sorted({layer.window for layer in layers if layer.window is not None})
    return tuple(
        LayerGroup(window, tuple(layer for layer in layers if layer.window == window))
        for window in (None, *windows)
    )
