"""Mamba-2: the `Mixer` of state space layers in Granite 4, Nemotron-H, Falcon-H1 and Bamba.

For each token, with x its hidden state:

    [z ; channels ; dt] = factors * (x W_in^T + b)
    step = clamp(softplus(dt + dt_bias), limits)        g = -exp(A_log) step
    y = the recurrence of channels, g and the step (aserve_kernels/delta_rule.py, `StateSpace`)
    out = norm(y * silu(z)) W_out^T + b

The norm is an RMS norm of each group of heads. It may come before the gate, or be left out. The
limits hold for each token; transformers applies them to prompts alone, which is the same for those
of all published models, 0 and infinity.

Source: https://arxiv.org/abs/2405.21060, modeling_granitemoehybrid.py in transformers
"""

from __future__ import annotations

import math

import msgspec
from torch import Tensor
from torch.nn import functional

from aserve.gpu.models.base import Attend
from aserve.gpu.models.config.fields import Fields, interval, is_text
from aserve.gpu.models.decoder_spec import DecoderSpec, Mixer
from aserve.gpu.models.recurrent import RecurrentSpec, with_states
from aserve.gpu.weights.source import WeightSource
from aserve_kernels.delta_rule import DeltaTokens, StateSpace

ANY_STEP = (0.0, math.inf)
# Values of the reference code for fields of config.json, in the spelling of most families.
MAMBA2_DEFAULTS = {
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "time_step_limit": [*ANY_STEP],
}


class SpaceShape(msgspec.Struct, frozen=True):
    """The sizes of a layer. Each group of heads shares one B and one C."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    num_taps: int

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Returns the number of channels of x, B and C together, which conv reads."""
        return self.inner_size + 2 * self.num_groups * self.state_dim

    @property
    def matrix_sizes(self) -> tuple[int, int, int]:
        return (self.num_heads, self.state_dim, self.head_dim)


class GateNorm(msgspec.Struct, frozen=True):
    """The norm of the output. `is_before_gate`: y is normalised, not y * silu(z)."""

    num_groups: int = 1
    is_before_gate: bool = False


class Mamba2Spec(msgspec.Struct, frozen=True):
    """The layers of one model; as a `MakeMixer`, it builds one of them."""

    shape: SpaceShape
    norm: GateNorm | None
    limits: tuple[float, float] = ANY_STEP
    has_conv_bias: bool = True
    has_in_bias: bool = False
    has_out_bias: bool = False
    factors: tuple[float, ...] = ()  # of z, x, B, C and dt; empty: all are 1

    def __call__(self, index: int, spec: DecoderSpec, weights: WeightSource, /) -> Mamba2:
        return Mamba2(index, spec, weights, layer=self)


def mamba2_spec(fields: Fields, *, inner_size: int | None = None) -> Mamba2Spec:
    """Returns the layers that a config describes, in the spelling of most families. `inner_size`:
    that of all heads, if the family has a field for it."""
    if inner_size is None:
        inner_size = fields.integer("mamba_expand") * fields.integer("hidden_size")
    num_heads, num_groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
    head_dim = inner_size // num_heads
    if not is_text(fields, "mamba_d_head", "auto"):
        head_dim = fields.integer("mamba_d_head")
    if num_heads * head_dim != inner_size:
        expected = f"as many heads as have {inner_size} elements together"
        fields.refuse("mamba_n_heads", expected=expected)
    if num_heads % num_groups:
        fields.refuse("mamba_n_groups", expected=f"a divisor of mamba_n_heads, {num_heads}")
    num_taps = fields.integer("mamba_d_conv", minimum=2)
    shape = SpaceShape(num_heads, head_dim, num_groups, fields.integer("mamba_d_state"), num_taps)
    bias = fields.flag("mamba_proj_bias")
    return Mamba2Spec(
        shape,
        GateNorm(num_groups),
        limits=interval(fields, "time_step_limit"),
        has_conv_bias=fields.flag("mamba_conv_bias"),
        has_in_bias=bias,
        has_out_bias=bias,
    )


class Mamba2:
    """The `Mixer`. It keeps nothing in the KV cache."""

    __slots__ = (
        *("bias", "conv", "decay", "dt_bias", "eps", "factors", "into", "layer", "norm", "out"),
        *("shape", "skip", "spec", "_kind"),
    )

    def __init__(
        self, index: int, spec: DecoderSpec, weights: WeightSource, /, *, layer: Mamba2Spec
    ) -> None:
        prefix, hidden_size = f"model.layers.{index}.mamba", spec.config.hidden_size
        shape = layer.shape
        num_heads, num_channels = shape.num_heads, shape.num_channels
        self.layer = None
        self.shape = shape
        self.spec = RecurrentSpec(index, shape)
        self._kind = layer
        self.into = weights.linear(
            {f"{prefix}.in_proj": shape.inner_size + num_channels + num_heads},
            in_features=hidden_size,
            bias=layer.has_in_bias,
        )
        conv = (num_channels, 1, shape.num_taps)
        self.conv = weights.tensor(f"{prefix}.conv1d.weight", conv, is_wide=True).squeeze(1)
        self.decay = -weights.tensor(f"{prefix}.A_log", (num_heads,), is_wide=True).exp()
        self.dt_bias = weights.tensor(f"{prefix}.dt_bias", (num_heads,), is_wide=True)
        self.skip = weights.tensor(f"{prefix}.D", (num_heads,), is_wide=True)
        self.bias = self.decay.new_zeros(num_channels)
        if layer.has_conv_bias:
            self.bias = weights.tensor(f"{prefix}.conv1d.bias", (num_channels,), is_wide=True)
        self.factors = _factors(layer, self.decay)
        self.eps = spec.config.rms_norm_eps
        self.norm = None
        if layer.norm is not None:
            sizes = (shape.inner_size,)
            self.norm = weights.tensor(f"{prefix}.norm.weight", sizes, is_wide=True)
        self.out = weights.linear(
            {f"{prefix}.out_proj": hidden_size},
            in_features=shape.inner_size,
            bias=layer.has_out_bias,
        )

    @property
    def is_norm_first(self) -> bool:
        """Whether y is normalised before the gate."""
        return self._kind.norm is not None and self._kind.norm.is_before_gate

    @property
    def num_norm_groups(self) -> int:
        return 0 if self._kind.norm is None else self._kind.norm.num_groups

    @property
    def limits(self) -> tuple[float, float]:
        return self._kind.limits

    def __call__(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        shape = self.shape
        sizes = (shape.inner_size, shape.num_channels, shape.num_heads)
        projected = self.into(x)
        if self.factors is not None:
            projected = projected * self.factors.to(x.dtype)
        z, channels, dt = projected.split(sizes, dim=-1)
        step = functional.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        if self._kind.limits != ANY_STEP:
            step = step.clamp(*self._kind.limits)
        space = StateSpace(self.bias, self.skip)
        tokens = DeltaTokens(channels, self.conv, self.decay * step, step, space)
        y = with_states(attend, self.spec).advance(self.spec, tokens).flatten(1)
        return self.out(self._gated(y, functional.silu(z.to(y.dtype))).to(x.dtype))

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        norm, weight = self._kind.norm, self.norm
        if norm is None or weight is None:
            return y * gate
        groups = (y if norm.is_before_gate else y * gate).unflatten(-1, (norm.num_groups, -1))
        normed = functional.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(1) * weight
        return normed * gate if norm.is_before_gate else normed


def _factors(layer: Mamba2Spec, like: Tensor) -> Tensor | None:
    """Returns the factors of the projection, of the dtype and device of `like`."""
    if not layer.factors:
        return None
    shape = layer.shape
    key_size = shape.num_groups * shape.state_dim
    sizes = (shape.inner_size, shape.inner_size, key_size, key_size, shape.num_heads)
    factors = like.new_empty(sum(sizes))
    for part, factor in zip(factors.split(sizes), layer.factors, strict=True):
        part.fill_(factor)
    return factors


class BesideFactors(msgspec.Struct, frozen=True):
    mamba_in: float = 1.0
    mamba_out: float = 1.0
    other_in: float = 1.0
    other_out: float = 1.0


class MambaBeside:
    """The `Mixer` of layers with Mamba-2 beside another mixer: the sum of both outputs."""

    __slots__ = ("factors", "layer", "mamba", "other", "spec")

    def __init__(self, mamba: Mamba2, other: Mixer, factors: BesideFactors) -> None:
        self.mamba = mamba
        self.other = other
        self.factors = factors
        self.layer = other.layer
        self.spec = mamba.spec

    def __call__(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        factors = self.factors
        y = self.mamba(x * factors.mamba_in, cos_sin, attend) * factors.mamba_out
        return y + self.other(x * factors.other_in, cos_sin, attend) * factors.other_out
