"""A language model in transformers' own modelling code, with attention over the paged KV cache.

A step's tokens run as one sequence. This is correct because probe.py has checked that, attention
aside, a token depends on its id and its position alone.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from aserve.gpu.kv.layer_groups import AttentionInputs
from aserve.gpu.models.base import Attend, HiddenCapture
from aserve.gpu.models.transformers.attention import run
from aserve.gpu.models.transformers.probe import Probed


class TransformersModel:
    """A `CausalModel`."""

    __slots__ = (
        "_probed",
        "dtype",
        "hidden_size",
        "layers",
        "max_model_len",
        "vocab_size",
    )

    def __init__(self, probed: Probed, *, dtype: torch.dtype, max_model_len: int) -> None:
        self._probed = probed
        self.dtype = dtype
        self.hidden_size = probed.hidden_size
        self.layers = tuple(probed.specs.values())
        self.max_model_len = max_model_len
        self.vocab_size = probed.vocab_size

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        specs = self._probed.specs

        def on_attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
            # Some models apply rope in float32 and keep that; the KV cache has the model's dtype.
            heads = torch.cat((q, k, v), dim=1).to(self.dtype)
            return attend(specs[module], AttentionInputs(heads))

        with ExitStack() as hooks:
            if capture is not None:
                for index, block in enumerate(self._probed.blocks):
                    hook = _Keep(capture, index, is_last=index == len(specs) - 1)
                    hooks.callback(block.register_forward_hook(hook).remove)
            answer = run(self._probed.split.body, input_ids, positions, on_attention)
        hidden: Tensor = answer.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._probed.split.logits(hidden)


class _Keep:
    """A forward hook that captures a block's output, [1, tokens, hidden] or a tuple with it."""

    def __init__(self, capture: HiddenCapture, index: int, *, is_last: bool) -> None:
        self._capture = capture
        self._index = index
        self._is_last = is_last

    def __call__(
        self, _module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]
    ) -> None:
        hidden = (output if isinstance(output, Tensor) else output[0])[0]
        if self._index in self._capture.layer_ids:
            self._capture.layers.append(hidden)
        if self._is_last and self._capture.wants_before_norm:
            self._capture.before_norm = hidden
