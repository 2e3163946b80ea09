"""The interface of a language model, and of the loader that builds one.

A model computes on one device and sees tokens, not pages, rows or batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.weights.source import HOST, OnProgress, Target, ignore_progress


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
        """input_ids int64 [tokens], or [tokens, n] for a `ReadsNgrams`; positions, for rope, int64
        [tokens], or [axes, tokens] if the model has several rope axes -> hidden states after the
        norm [tokens, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab], in the model's dtype or a wider one. The sampler widens 16-bit
        logits where it adds to them."""


class DraftModel(Protocol):
    """A second, smaller model that guesses the target's next tokens. It has the target's
    vocabulary, and KV pools of its own."""

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, hidden: Tensor | None = None
    ) -> Tensor:
        """Does what `CausalModel.forward` does. A drafter that reads them is given `hidden`, the
        target's hidden states [tokens, hidden].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, draft hidden] -> [n, vocab]."""


def wide_logits(logits: Tensor) -> Tensor:
    """Logits as at least float32. The conversion is exact."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Attend(Protocol):
    """Attention of one layer over paged KV: applies rope to queries and keys, stores what the layer
    stores for this forward's tokens, then attends to all keys that the layer's mask admits."""

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor:
        """Returns [tokens, num_heads, head_dim], or value_dim in place of head_dim for latents. The
        result is valid until the next call for another layer."""


@dataclass(slots=True)
class HiddenCapture:
    """`layers` gets one tensor [tokens, hidden] for each of `layer_ids`, in the order of the
    layers: the residual stream after that layer. `before_norm` gets what enters the final norm."""

    layer_ids: tuple[int, ...] = ()
    wants_before_norm: bool = False
    layers: list[Tensor] = field(default_factory=list)
    before_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The options of a load."""

    dtype: torch.dtype
    max_model_len: int | None = None  # None: the model's own
    is_dummy: bool = False  # random weights, without a checkpoint
    target: Target = HOST
    on_progress: OnProgress = ignore_progress  # called on the thread that loads
    tensors: tuple[Path, ...] = ()  # files whose tensors replace those of the checkpoint


class ModelLoader(Protocol):
    """A model directory whose configuration has been read, and whose weights have not."""

    @property
    def stored_dtype(self) -> str | None:
        """The checkpoint's dtype, where its config names one."""

    @property
    def stored_quantization(self) -> str | None:
        """The format in which a device may keep the checkpoint's quantized layers as they are; None
        if they are widened, or not quantized."""

    @property
    def num_weights(self) -> int:
        """The number of elements of all weights."""

    def own_name(self, name: str, /) -> str | None:
        """Returns the name that the model has for a tensor of the checkpoint; None: it has none."""

    def load(self, plan: LoadPlan) -> CausalModel:
        """Builds the model. Weights that do not fit the config or the memory are refused before a
        value is read, as far as that is known by then."""
