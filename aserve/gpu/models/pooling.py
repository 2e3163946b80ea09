"""Pooling: one vector for each prompt, from the hidden states of its tokens.

With the hidden states h_0 ... h_{n-1} of a prompt after the last norm:

    cls:   x = h_0              mean:  x = (h_0 + ... + h_{n-1}) / n              last:  x = h_{n-1}

then y = head(x), if the model has a head, and y / |y|, if the model's embeddings have length 1. The
modes are those of sentence-transformers.

A `PooledModel` is a model that is built to be pooled. Other models generate, and their embeddings
are those of `LAST_TOKEN`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.models.base import Attend, CausalModel, HiddenCapture, wide_logits
from aserve.messages.executor import Task

PoolingMode: TypeAlias = Literal["cls", "mean", "last"]
PoolingHead: TypeAlias = Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, size]


@dataclass(frozen=True, slots=True)
class PooledTokens:
    """The tokens of the prompts to pool, one prompt behind the other. Indices are into the tokens
    of the step. A prompt that was cut into chunks has only its last tokens here."""

    indices: Tensor  # int64 [tokens]
    lens: Tensor  # int64 [rows]
    last: Tensor  # int64 [rows], the index of each prompt's last token


@dataclass(frozen=True, slots=True)
class Pooler:
    mode: PoolingMode = "last"
    has_unit_length: bool = True
    head: PoolingHead | None = None

    def __call__(self, hidden: Tensor, tokens: PooledTokens) -> Tensor:
        """hidden [tokens of the step, hidden] -> float32 [rows, size]. All but the head is computed
        in float32 at least: a narrow dtype would round the mean and the length."""
        pooled = self._pooled(hidden, tokens)
        if self.head is not None:
            pooled = wide_logits(self.head(pooled.to(hidden.dtype)))
        if self.has_unit_length:
            pooled = functional.normalize(pooled, dim=1)
        return pooled.float()

    def _pooled(self, hidden: Tensor, tokens: PooledTokens) -> Tensor:
        if self.mode == "mean":
            wide = wide_logits(hidden.index_select(0, tokens.indices))
            return torch.segment_reduce(wide, "mean", lengths=tokens.lens, axis=0, unsafe=True)
        places = tokens.last
        if self.mode == "cls":
            places = places - tokens.lens + 1
        return wide_logits(hidden.index_select(0, places))


LAST_TOKEN = Pooler()


class PooledModel:
    """A `CausalModel` that answers each prompt with one vector. Its task is `embed`, or `classify`
    if the vector holds the scores of labels. With `whole_prompts` a prompt is computed in one step,
    because its first tokens see its last ones, or because all of them are pooled.
    """

    __slots__ = (
        *("backbone", "pooler", "task", "whole_prompts"),
        *("dtype", "hidden_size", "layers", "max_model_len", "vocab_size"),
    )

    def __init__(
        self, backbone: CausalModel, pooler: Pooler, *, task: Task, whole_prompts: bool
    ) -> None:
        self.backbone = backbone
        self.pooler = pooler
        self.task = task
        self.whole_prompts = whole_prompts
        self.dtype = backbone.dtype
        self.hidden_size = backbone.hidden_size
        self.layers = backbone.layers
        self.max_model_len = backbone.max_model_len
        self.vocab_size = backbone.vocab_size

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        return self.backbone.forward(input_ids, positions, attend, capture=capture)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.backbone.logits(hidden)


def generating(model: CausalModel) -> PooledModel:
    """Returns a model that generates, which also embeds prompts by their last token."""
    return PooledModel(model, LAST_TOKEN, task="generate", whole_prompts=False)
