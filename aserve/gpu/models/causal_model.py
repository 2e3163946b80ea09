"""The protocol between a language model and what runs it.

A model is single-device mathematics: it knows no pages, rows or batches.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.models.attend import Attend
from aserve.gpu.models.hidden_capture import HiddenCapture
from aserve.gpu.models.layer_spec import LayerSpec


class CausalModel(Protocol):
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    max_model_len: int
    dtype: torch.dtype

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        """input_ids, positions: int64 [tokens] -> hidden states after the norm [tokens, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab], of the model's dtype or wider: whoever calculates with them
        widens what it reads."""


def wide_logits(logits: Tensor) -> Tensor:
    """Halves as float32, which changes no value."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
