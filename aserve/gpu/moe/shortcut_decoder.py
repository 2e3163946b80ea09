"""A decoder whose experts stand on a shortcut around the next attention (ScMoE).

Two layers of the shared decoder, a and b, have one mixture of experts between them. It reads what
the MLP of a reads, and its result joins the residual stream h behind the MLP of b:

    h = h + mixer_a(norm(h));   x = norm(h)
    h = h + mlp_a(x)
    h = h + mixer_b(norm(h))
    h = h + mlp_b(norm(h)) + experts(x)

So rows can travel to the experts while mlp_a computes, and back while mixer_b does.
Source: https://arxiv.org/abs/2404.05019; modeling_longcat_flash.py in transformers
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aserve.gpu.models.base import Attend, HiddenCapture
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.moe.layer import Computed, ExpertMlp


class ShortcutDecoder:
    """A `CausalModel`. Layers 2 i and 2 i + 1 of `decoder` have the experts `shortcuts[i]`."""

    __slots__ = (
        *("decoder", "dtype", "embed", "hidden_size", "layers", "logits", "max_model_len"),
        *("shortcuts", "vocab_size"),
    )

    def __init__(self, decoder: Decoder, shortcuts: Sequence[ExpertMlp]) -> None:
        self.decoder = decoder
        self.shortcuts = tuple(shortcuts)
        self.layers = decoder.layers
        self.vocab_size = decoder.vocab_size
        self.hidden_size = decoder.hidden_size
        self.max_model_len = decoder.max_model_len
        self.dtype = decoder.dtype
        self.embed = decoder.embed
        self.logits = decoder.logits

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        return self.run(self.embed(input_ids), positions, attend, capture)

    def run(
        self, hidden: Tensor, positions: Tensor, attend: Attend, capture: HiddenCapture | None
    ) -> Tensor:
        """Does what `forward` does, from embeddings [tokens, hidden]."""
        decoder = self.decoder
        cos_sin = [rotary.at(positions) for rotary in decoder.rotaries]
        normed = decoder.first_norm(hidden)
        computed: Computed | None = None
        for index, block in enumerate(decoder.blocks):
            experts = self.shortcuts[index // 2]
            hidden, normed = block.attended(hidden, normed, cos_sin[block.rotary], attend)
            if computed is None:
                started = experts.start(normed)
                change = block.mlp(normed)
                computed = experts.compute(started)
            else:
                change = block.mlp(normed) + experts.finish(computed)
                computed = None
            hidden, normed = block.before_next(hidden, change)
            if capture is not None and index in capture.layer_ids:
                capture.layers.append(hidden)
        if capture is not None and capture.wants_before_norm:
            capture.before_norm = hidden
        return normed
