"""Gated DeltaNet: the `Mixer` of linear attention in Qwen3-Next and Qwen3.5.

For each token, with x its hidden state:

    channels = x W_qkv^T       z = x W_z^T       b = x W_b^T       a = x W_a^T
    g = -exp(A_log) softplus(a + dt_bias)        rate = sigmoid(b)
    y = the recurrence of channels, g and the rate (aserve_kernels/delta_rule.py)
    out = (norm(y) * silu(z)) W_o^T

Source: https://arxiv.org/abs/2412.06464, modeling_qwen3_5.py and modeling_qwen3_next.py in
transformers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.models.base import Attend
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.decoder_spec import DecoderSpec, MakeMixer
from aserve.gpu.models.recurrent import RecurrentSpec, with_states
from aserve.gpu.weights.source import WeightSource
from aserve_kernels.delta_rule import DeltaTokens

# A field that is false where a checkpoint of Qwen3-Next has q, k, v and z, and b and a, one after
# the other, not by key heads.
HAS_GROUPS = "has_grouped_projections"


class DeltaShape(msgspec.Struct, frozen=True):
    """The sizes of a layer, by their names in config.json."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    @classmethod
    def of(cls, fields: Fields) -> DeltaShape:
        shape = cls(**{name: fields.integer(name) for name in cls.__struct_fields__})
        if shape.linear_num_value_heads % shape.linear_num_key_heads:
            expected = f"a multiple of linear_num_key_heads, {shape.linear_num_key_heads}"
            fields.refuse("linear_num_value_heads", expected=expected)
        if shape.linear_conv_kernel_dim < 2:
            fields.refuse("linear_conv_kernel_dim", expected="at least 2")
        return shape

    @property
    def key_size(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def num_channels(self) -> int:
        """Returns the number of channels of queries, keys and values together, which conv reads."""
        return 2 * self.key_size + self.value_size

    @property
    def matrix_sizes(self) -> tuple[int, int, int]:
        sizes = (self.linear_key_head_dim, self.linear_value_head_dim)
        return (self.linear_num_value_heads, *sizes)

    @property
    def num_taps(self) -> int:
        return self.linear_conv_kernel_dim


@dataclass(frozen=True, slots=True)
class Projected:
    """The projections of x, [tokens, ...]."""

    channels: Tensor  # [channels]: q, k and v
    z: Tensor  # [value heads, d_v]
    b: Tensor  # [value heads]
    a: Tensor  # [value heads]


class Projection(Protocol):
    @property
    def wide(self) -> LinearOp:
        """The layer of q, k, v and z."""

    @property
    def narrow(self) -> LinearOp:
        """The layer of b and a."""

    @property
    def num_groups(self) -> int:
        """Returns how many groups both layers' outputs have. Each has its part of q, k, v and z,
        or of b and a."""

    def __call__(self, x: Tensor, /) -> Projected: ...


class MakeProjection(Protocol):
    def __call__(
        self, prefix: str, shape: DeltaShape, weights: WeightSource, /, *, hidden_size: int
    ) -> Projection: ...


class GatedDeltaNet:
    """The `Mixer`. It keeps nothing in the KV cache. A device's fused step reads its parts."""

    __slots__ = (
        *("conv", "decay", "dt_bias", "eps", "layer", "norm", "out", "project", "shape"),
        "spec",
    )

    def __init__(
        self,
        index: int,
        spec: DecoderSpec,
        weights: WeightSource,
        /,
        *,
        shape: DeltaShape,
        project: MakeProjection,
    ) -> None:
        prefix, hidden_size = f"model.layers.{index}.linear_attn", spec.config.hidden_size
        num_heads, kernel = shape.linear_num_value_heads, shape.linear_conv_kernel_dim
        self.layer = None
        self.shape = shape
        self.spec = RecurrentSpec(index, shape)
        self.project = project(prefix, shape, weights, hidden_size=hidden_size)
        sizes = (shape.num_channels, 1, kernel)
        # NOTE: compiled steps read these weights where they are, so that new ones reach them.
        self.conv = weights.tensor(f"{prefix}.conv1d.weight", sizes, is_wide=True).squeeze(1)
        self.decay = -weights.tensor(f"{prefix}.A_log", (num_heads,), is_wide=True).exp()
        self.dt_bias = weights.tensor(f"{prefix}.dt_bias", (num_heads,), is_wide=True)
        head_dim = shape.linear_value_head_dim
        self.norm = weights.tensor(f"{prefix}.norm.weight", (head_dim,), is_wide=True)
        self.eps = spec.config.rms_norm_eps
        self.out = weights.linear(
            {f"{prefix}.out_proj": hidden_size}, in_features=shape.value_size, bias=False
        )

    def __call__(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        parts = self.project(x)
        log_decay = self.decay * functional.softplus(parts.a.to(self.decay.dtype) + self.dt_bias)
        tokens = DeltaTokens(parts.channels, self.conv, log_decay, parts.b.sigmoid())
        y = with_states(attend, self.spec).advance(self.spec, tokens)
        gate = functional.silu(parts.z.to(y.dtype))
        normed = functional.rms_norm(y, self.norm.shape, self.norm, self.eps)
        return self.out((normed * gate).to(x.dtype).flatten(1))


def is_gated_delta(mixer: MakeMixer) -> bool:
    return isinstance(mixer, partial) and mixer.func is GatedDeltaNet


@dataclass(frozen=True, slots=True)
class JoinedProjection:
    """The projections of Qwen3.5: q, k and v one after the other, and z. b and a are two layers, or
    one."""

    shape: DeltaShape
    wide: LinearOp  # q, k, v and z
    narrow: LinearOp  # b and a

    @classmethod
    def of(
        cls,
        prefix: str,
        shape: DeltaShape,
        weights: WeightSource,
        /,
        *,
        hidden_size: int,
        narrow_names: Sequence[str] = ("in_proj_b", "in_proj_a"),
    ) -> JoinedProjection:
        num_rows = 2 * shape.linear_num_value_heads // len(narrow_names)
        wide = {"in_proj_qkv": shape.num_channels, "in_proj_z": shape.value_size}
        narrow = dict.fromkeys(narrow_names, num_rows)
        return cls(shape, *_linears(prefix, weights, (wide, narrow), hidden_size=hidden_size))

    @property
    def num_groups(self) -> int:
        return 1

    def __call__(self, x: Tensor, /) -> Projected:
        shape = self.shape
        channels, z = self.wide(x).split((shape.num_channels, shape.value_size), dim=-1)
        b, a = self.narrow(x).chunk(2, dim=-1)
        return Projected(channels, z.unflatten(-1, (shape.linear_num_value_heads, -1)), b, a)


@dataclass(frozen=True, slots=True)
class GroupedProjection:
    """The projections of Qwen3-Next: each key head with the value heads that it serves."""

    shape: DeltaShape
    wide: LinearOp  # q, k, v and z
    narrow: LinearOp  # b and a

    @classmethod
    def of(
        cls, prefix: str, shape: DeltaShape, weights: WeightSource, /, *, hidden_size: int
    ) -> GroupedProjection:
        wide = {"in_proj_qkvz": shape.num_channels + shape.value_size}
        narrow = {"in_proj_ba": 2 * shape.linear_num_value_heads}
        return cls(shape, *_linears(prefix, weights, (wide, narrow), hidden_size=hidden_size))

    @property
    def num_groups(self) -> int:
        return self.shape.linear_num_key_heads

    def __call__(self, x: Tensor, /) -> Projected:
        shape, num_groups = self.shape, self.num_groups
        value_size = shape.value_size // num_groups
        sizes = (2 * shape.linear_key_head_dim, value_size, value_size)
        qk, v, z = self.wide(x).unflatten(-1, (num_groups, -1)).split(sizes, dim=-1)
        q, k = qk.chunk(2, dim=-1)
        b, a = self.narrow(x).unflatten(-1, (num_groups, -1)).chunk(2, dim=-1)
        z = z.flatten(1).unflatten(-1, (shape.linear_num_value_heads, -1))
        channels = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        return Projected(channels, z, b.flatten(1), a.flatten(1))


def _linears(
    prefix: str, weights: WeightSource, layers: Iterable[Mapping[str, int]], *, hidden_size: int
) -> list[LinearOp]:
    """Returns one linear layer for each mapping of names to numbers of rows."""
    return [
        weights.linear(
            {f"{prefix}.{name}": size for name, size in parts.items()},
            in_features=hidden_size,
            bias=False,
        )
        for parts in layers
    ]
