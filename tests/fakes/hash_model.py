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
from aserve.gpu.models.indexer import IndexInputs
from aserve.gpu.models.latent_attention import (
    LatentAttend,
    LatentInputs,
    SparseAttend,
    UpProjection,
    attend_absorbed,
)

HEAD_DIM = 8
NUM_HEADS = 2
NOPE_DIM, ROPE_DIM = 2, 4  # of queries of latents
STRENGTH = 1000.0
MAX_LOGIT = 3.0
VOCAB = 37


class HashModel:
    """Layer 0 sees everything, layer 1 has `window`; layer 2 is there if there is a
    `second_window`, and has that. Where it `is_latent`, layers keep values as latents; with a
    `top_k` as well, a query sees as many of them as an indexer chooses. What a token keeps depends
    on the `id_window - 1` ids before it, too."""

    def __init__(
        self,
        *,
        window: int | None = None,
        second_window: int | None = None,
        is_latent: bool = False,
        top_k: int = 0,
        id_window: int = 1,
        vocab_size: int = VOCAB,
        max_model_len: int = 64,
        device: torch.device | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

        windows = (None, window) if second_window is None else (None, window, second_window)
        self.layers: tuple[LayerSpec, ...] = tuple(
            _layer(index, own, is_latent=is_latent, top_k=top_k)
            for index, own in enumerate(windows)
        )
        self.id_window = id_window
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
        phases = positions[:, None] * self._rates
        for place, ids in enumerate(input_ids.unbind(1) if input_ids.ndim == 2 else [input_ids]):
            phases = phases + (1 + place) * self._phases[ids]  # -1 has the last phase
        features = torch.sin(phases)
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
        if self.layers[layer].value_dim is not None:
            return _read_latents(attend, self.layers[layer], values)
        heads = values.new_zeros((len(values), NUM_HEADS + 2, HEAD_DIM))
        heads[:, -1] = values
        return attend(self.layers[layer], AttentionInputs(heads)).flatten(1).clone()


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
        is_latent: bool = False,
        top_k: int = 0,
        id_window: int = 1,
        is_unsound: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            window=window,
            second_window=second_window,
            is_latent=is_latent,
            top_k=top_k,
            id_window=id_window,
            device=device,
        )
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


def _read_latents(attend: Attend, layer: LayerSpec, values: Tensor) -> Tensor:
    """Queries are zero; the second head's values are the latents in reverse order."""
    queries = values.new_zeros((len(values), NUM_HEADS, NOPE_DIM + ROPE_DIM))
    latents = torch.nn.functional.pad(values, (0, ROPE_DIM))[:, None]
    eye = torch.eye(HEAD_DIM, dtype=values.dtype, device=values.device)
    up = UpProjection(
        key=values.new_ones((NUM_HEADS, NOPE_DIM, HEAD_DIM)), value=torch.stack((eye, eye.flip(0)))
    )
    inputs = LatentInputs(queries, latents, up)
    if layer.index_dim:
        assert isinstance(attend, SparseAttend)
        # A query looks for other values than its own.
        sought = torch.stack((values.roll(1, dims=-1), -values), dim=1)
        index = IndexInputs(sought, values.abs()[:, :2], values)
        return attend.attend_sparse(layer, inputs, index).flatten(1)
    if isinstance(attend, LatentAttend):
        return attend.attend_latents(layer, inputs).flatten(1)
    return attend_absorbed(attend, layer, inputs).flatten(1)


def _layer(index: int, window: int | None, *, is_latent: bool, top_k: int) -> LayerSpec:
    if is_latent:
        return LayerSpec(
            index=index,
            num_heads=NUM_HEADS,
            num_kv_heads=1,
            head_dim=HEAD_DIM + ROPE_DIM,
            scale=1.0,
            window=window,
            value_dim=HEAD_DIM,
            expanded_dim=HEAD_DIM + NOPE_DIM,
            index_dim=HEAD_DIM if top_k else 0,
            index_top_k=top_k,
        )
    return LayerSpec(
        index=index,
        num_heads=NUM_HEADS,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        scale=1.0,
        window=window,
    )
