"""The short convolution with gates: the `Mixer` of most layers of LFM2.

    [b ; c ; u] = W_in x        out = W_out (c * conv(b * u))

conv is causal, and has weights of its own for each channel. A row keeps its last inputs.
Source: modeling_lfm2.py in transformers
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from aserve.gpu.models.base import Attend
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.recurrent import RecurrentSpec, with_states
from aserve.gpu.weights.source import WeightSource

CHANNELS = "num_conv_channels"  # a field of the configuration where they are divided among ranks


class ConvShape(msgspec.Struct, frozen=True):
    num_channels: int
    num_taps: int

    @property
    def matrix_sizes(self) -> tuple[int, int, int]:
        return (0, 0, 0)


class ShortConv:
    """The `Mixer`. It keeps nothing in the KV cache. A device's fused step reads its parts."""

    __slots__ = ("bias", "conv", "into", "layer", "out", "spec")

    def __init__(self, index: int, spec: DecoderSpec, weights: WeightSource, /) -> None:
        fields, hidden_size = spec.config.fields, spec.config.hidden_size
        prefix, bias = f"model.layers.{index}.conv", fields.flag("conv_bias")
        size = fields.integer(CHANNELS, default=hidden_size)
        shape = ConvShape(size, fields.integer("conv_L_cache", minimum=2))
        self.layer = None
        self.spec = RecurrentSpec(index, shape)
        self.into = weights.linear(
            {f"{prefix}.in_proj": 3 * size}, in_features=hidden_size, bias=bias
        )
        sizes = (size, 1, shape.num_taps)
        conv = weights.tensor(f"{prefix}.conv.weight", sizes, is_wide=True)
        # NOTE: compiled steps read these weights where they are, so that new ones reach them.
        self.conv = conv.squeeze(1).T.contiguous()  # [taps, channels]
        self.bias = None
        if bias:
            self.bias = weights.tensor(f"{prefix}.conv.bias", (size,), is_wide=True)
        self.out = weights.linear({f"{prefix}.out_proj": hidden_size}, in_features=size, bias=bias)

    def __call__(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        b, c, u = self.into(x).chunk(3, dim=-1)
        mixed = with_states(attend, self.spec).convolve(self.spec, b * u, self.conv.T)
        if self.bias is not None:
            mixed = mixed + self.bias
        return self.out(c * mixed.to(x.dtype))
