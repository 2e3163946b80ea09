"""The layers that draft models share: those of a decoder, over tokens and mostly also over hidden
states of the target.

    y      = [norm_e(e_t) ; norm_h(h)]         e_t = embeddings[t] * factor; or with h first
    x      = W y + b,  n = first_norm(x)       without W: x = h or norm_h(h), and n = y
    layers   of the decoder, from the residual stream x and the first layer's input n
    logits = head(head_norm(...))              often the target's head

A model without hidden states begins as a decoder does: x = e_t, n = first_norm(x).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.layers.norm import Norm
from aserve.gpu.layers.rope import Rotary
from aserve.gpu.models.base import Attend, CausalModel
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Block


def unchanged(x: Tensor) -> Tensor:
    """The norm of a model that has none at this place."""
    return x


class ScaledSum:
    """A `SumAndNorm` with a factor for the whole stream: `s = (hidden + added) * factor`."""

    __slots__ = ("factor", "norm")

    def __init__(self, norm: Norm, factor: Tensor) -> None:
        self.norm = norm
        self.factor = factor  # [1]

    def __call__(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        total = (hidden + added) * self.factor
        return total, self.norm(total)


@dataclass(frozen=True, slots=True)
class JoinedInputs:
    """Joins embeddings and hidden states, which have the same size, to the first layer's input."""

    embedding_norm: Norm = unchanged
    hidden_norm: Norm = unchanged
    is_hidden_first: bool = False
    projection: LinearOp | None = None  # None: both together are the input
    keeps_normed: bool = False  # without a projection, the residual is the normed hidden state

    def __call__(self, embedded: Tensor, hidden: Tensor, first_norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns the residual stream, and the input of the first layer."""
        normed = self.hidden_norm(hidden)
        parts = [self.embedding_norm(embedded), normed]
        joined = torch.cat(parts[::-1] if self.is_hidden_first else parts, dim=1)
        if self.projection is None:
            return (normed if self.keeps_normed else hidden), joined
        projected = self.projection(joined)
        return projected, first_norm(projected)


@dataclass(frozen=True, slots=True)
class DraftDecoder:
    """A `DraftModel`. A device's compiled forward reads its parts. The norm behind the last layer
    is that layer's `before_next`."""

    config: ModelConfig
    target: CausalModel
    dtype: torch.dtype
    embeddings: Tensor  # [vocab, hidden]
    blocks: tuple[Block, ...]
    rotaries: tuple[Rotary, ...]
    inputs: JoinedInputs | None = None
    embedding_factor: float = 1.0
    first_norm: Norm = unchanged
    head_norm: Norm = unchanged
    head: LinearOp | None = None  # None: the target's
    next_hidden: LinearOp | None = None  # makes the next token's hidden state of the output
    token_ids: Tensor | None = None  # int64 [draft vocab], the target's ids of a reduced vocabulary

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(block.mixer.layer for block in self.blocks if block.mixer.layer is not None)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, hidden: Tensor | None = None
    ) -> Tensor:
        cos_sin = [rotary.at(positions) for rotary in self.rotaries]
        stream = functional.embedding(input_ids, self.embeddings)
        if self.embedding_factor != 1.0:
            stream = stream * self.embedding_factor
        if self.inputs is None:
            normed = self.first_norm(stream)
        else:
            assert hidden is not None
            stream, normed = self.inputs(stream, hidden, self.first_norm)
        for block in self.blocks:
            stream, normed = block(stream, normed, cos_sin[block.rotary], attend)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        normed = self.head_norm(hidden)
        return self.target.logits(normed) if self.head is None else self.head(normed)
