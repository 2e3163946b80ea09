"""What a model directory says of its model before a weight is read, and how to go on from there.

It knows no family: aserve's own code and that of transformers each have a blueprint of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from aserve.gpu.models.causal_model import CausalModel
from aserve.gpu.weights.progress import OnProgress, ignore_progress
from aserve.gpu.weights.target import HOST, Target


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a model is wanted. `is_dummy`: with weights drawn at random, without a checkpoint."""

    dtype: torch.dtype
    max_model_len: int | None = None
    is_dummy: bool = False
    target: Target = HOST
    on_progress: OnProgress = ignore_progress  # called on the thread that loads


class Blueprint(Protocol):
    @property
    def stored_dtype(self) -> str | None:
        """The checkpoint's, if it says so."""

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""

    def load(self, plan: LoadPlan) -> CausalModel:
        """What does not fit is refused before a value is read, as far as that can be told."""
