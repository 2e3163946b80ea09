"""A CausalModel without meaning, whose every mistake shows: KV holds (token, position), and logits
are a hash of the list that attention reads back.

Attention is uniform, so that each position weighs the same. Layer 1 keeps a hash of what layer 0
read, so that a wrong slot that was read once shows for ever. Phases are multiplied by STRENGTH: one
other token, position or length turns all logits round, while rounding in float64 stays at 1e-10.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.models.base import Attend, HiddenCapture

HEAD_DIM = 8
NUM_HEADS = 2
STRENGTH = 1000.0
MAX_LOGIT = 3.0
VOCAB = 37


class HashModel:
    """Layer 0 sees everything, layer 1 has `window`; layer 2 is there if there is a
    `second_window`, and has that."""

    def __init__(
        self,
        *,
        window: int | None = None,
        second_window: int | None = None,
        vocab_size: int = VOCAB,
        max_model_len: int = 64,
        device: torch.device | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

        windows = (None, window) if second_window is None else (None, window, second_window)
        self.layers: tuple[LayerSpec, ...] = tuple(map(_layer, range(len(windows)), windows))
        self.vocab_size = vocab_size
        self.hidden_size = len(windows) * NUM_HEADS * HEAD_DIM
        self.max_model_len = max_model_len
        self.dtype = torch.float64
        self._phases = weights(vocab_size, HEAD_DIM) * 3
        self._rates = weights(HEAD_DIM)
        self._mix = weights(NUM_HEADS * HEAD_DIM, HEAD_DIM)
        self._head = weights(self.hidden_size, vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        hidden = self.hidden(input_ids, positions, attend)
        if capture is not None:
            capture.before_norm = hidden
        return hidden

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """What a forward returns: a test may override it."""
        features = torch.sin(self._phases[input_ids] + positions[:, None] * self._rates)
        reads = [self._read(attend, 0, features)]
        for layer in range(1, len(self.layers)):
            reads.append(self._read(attend, layer, _hash(reads[-1], self._mix)))
        return torch.cat(reads, dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        return MAX_LOGIT * _hash(hidden, self._head)

    def _read(self, attend: Attend, layer: int, values: Tensor) -> Tensor:
        """values [tokens, head_dim] -> the mean of what each token sees [tokens, heads * head_dim].

        Equal keys make equal weights.
        """
        heads = values.new_zeros((len(values), NUM_HEADS + 2, HEAD_DIM))
        heads[:, -1] = values
        return attend(self.layers[layer], AttentionInputs(heads)).flatten(1)


class FlakyModel(HashModel):
    """Fails in the forwards of these numbers (from 1 on): after its KV was written, so that a
    failed step leaves everything behind but a result. It raises; or, where it is `unsound`, its
    hidden states are NaN, which shows only when the result is read."""

    def __init__(
        self,
        fails: Collection[int],
        *,
        window: int | None = None,
        second_window: int | None = None,
        is_unsound: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(window=window, second_window=second_window, device=device)
        self.fails = frozenset(fails)
        self.is_unsound = is_unsound
        self.num_forwards = 0

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.num_forwards += 1
        hidden = super().hidden(input_ids, positions, attend)
        if self.num_forwards in self.fails:
            if self.is_unsound:
                return hidden * torch.nan
            raise ArithmeticError(f"forward {self.num_forwards} fails, as the test wants it")
        return hidden


def _hash(x: Tensor, weights: Tensor) -> Tensor:
    return torch.sin(STRENGTH * (x @ weights))


def _layer(index: int, window: int | None) -> LayerSpec:
    return LayerSpec(
        index=index,
        num_heads=NUM_HEADS,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        scale=1.0,
        window=window,
    )
