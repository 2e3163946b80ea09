"""Reads the rotary part of a configuration, in both dialects.

The older one has `rope_theta` beside `rope_scaling` (with `type` or `rope_type`), the newer one has
all of it in `rope_parameters`. Defaults are resolved here: the records that come out are complete.
"""

from __future__ import annotations

import math

from aserve.gpu.layers.rope import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    Rope,
    YarnRope,
)
from aserve.gpu.models.fields import Fields

SUPPORTED = "default, linear, dynamic, yarn, llama3, longrope"
DEFAULT_THETA = 10_000.0
LAYER_KINDS = ("full_attention", "sliding_attention")


def parse_rope(fields: Fields, *, head_dim: int, max_position_embeddings: int) -> Rope:
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    _refuse_partial(fields)
    _refuse_partial(rope)
    _refuse_kinds_of_layers(rope)
    theta = _theta(fields, rope)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    trained_len = _original_len(fields, rope, default=max_position_embeddings)
    match kind:
        case "default":
            return DefaultRope(theta)
        case "linear":
            return LinearRope(theta, rope.number("factor"))
        case "dynamic":
            return DynamicRope(theta, rope.number("factor"), max_position_embeddings)
        case "yarn":
            return _yarn(rope, theta, trained_len, max_position_embeddings=max_position_embeddings)
        case "llama3":
            return _llama3(rope, theta, trained_len)
        case "longrope":
            ratio = max_position_embeddings / trained_len
            return _longrope(rope, theta, trained_len, ratio=ratio, half=head_dim // 2)
        case _:
            rope.refuse("rope_type" if rope.has("rope_type") else "type", expected=SUPPORTED)


def longest_context(rope: Rope, max_position_embeddings: int) -> int:
    """Positions up to which the frequencies are meant to be used."""
    match rope:
        case LinearRope(factor=factor) | DynamicRope(factor=factor):
            return int(max_position_embeddings * factor)
        case YarnRope(factor=factor, original_len=trained_len):
            return max(max_position_embeddings, int(trained_len * factor))
        case Llama3Rope(factor=factor, original_len=trained_len):
            return max(max_position_embeddings, int(trained_len * factor))
        case DefaultRope() | LongRope():
            return max_position_embeddings


def _theta(fields: Fields, rope: Fields) -> float:
    holder = rope if rope.has("rope_theta") else fields
    theta = holder.number("rope_theta", default=DEFAULT_THETA)
    if theta <= 1:
        holder.refuse("rope_theta", expected="more than 1")
    return theta


def _refuse_kinds_of_layers(rope: Fields) -> None:
    for kind in LAYER_KINDS:
        if rope.has(kind):
            rope.refuse(kind, expected="the same rotary parameters for all layers")


def _refuse_partial(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", default=1.0) != 1.0:
        fields.refuse("partial_rotary_factor", expected="1.0, as in every family supported here")


def _original_len(fields: Fields, rope: Fields, *, default: int) -> int:
    """Beside the rotary section in some checkpoints; then that one counts."""
    name = "original_max_position_embeddings"
    return fields.integer(name, default=rope.integer(name, default=default, minimum=2))


def _yarn(rope: Fields, theta: float, trained_len: int, *, max_position_embeddings: int) -> Rope:
    factor = rope.number("factor", default=max_position_embeddings / trained_len)
    return YarnRope(
        theta,
        factor,
        trained_len,
        attention_factor=rope.number("attention_factor", default=_yarn_attention(rope, factor)),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.flag("truncate", default=True),
    )


def _yarn_attention(rope: Fields, factor: float) -> float:
    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.has("mscale") and rope.has("mscale_all_dim"):
        return temperature(rope.number("mscale")) / temperature(rope.number("mscale_all_dim"))
    return temperature(1.0)


def _llama3(rope: Fields, theta: float, trained_len: int) -> Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        rope.refuse("high_freq_factor", expected=f"more than low_freq_factor, which is {low}")
    return Llama3Rope(theta, rope.number("factor"), trained_len, low, high)


def _longrope(rope: Fields, theta: float, trained_len: int, *, ratio: float, half: int) -> Rope:
    factor = rope.number("factor", default=ratio)
    temperature = 1.0
    if factor > 1:
        temperature = math.sqrt(1 + math.log(factor) / math.log(trained_len))
    return LongRope(
        theta,
        trained_len,
        attention_factor=rope.number("attention_factor", default=temperature),
        short_factor=rope.numbers("short_factor", length=half),
        long_factor=rope.numbers("long_factor", length=half),
    )
