"""Reads the rope fields of a configuration into a complete `Rope` record.

Older files have `rope_theta` beside `rope_scaling` (with `type` or `rope_type`). Newer files have
all of it in `rope_parameters`, once for all layers or once per layer type. The rules and defaults
are those of modeling_rope_utils.py in transformers.
"""

from __future__ import annotations

import math

from aserve.gpu.layers.rope_scaling import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRope,
    QueryScale,
    Rope,
    YarnRope,
)
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import LAYER_KINDS, SLIDING
from aserve.messages.base import MAX_INT32

SUPPORTED = "default, linear, dynamic, yarn, llama3, longrope"
DEFAULT_THETA = 10_000.0
THETA = "rope_theta"
LOCAL_THETA = "rope_local_base_freq"  # theta of sliding layers, in older files
PARTIAL = "partial_rotary_factor"
BETA = "llama_4_scaling_beta"
SECTIONS = "mrope_section"  # of positions with several axes


def rotary_part(fields: Fields) -> float:
    """Returns the fraction of each head that rope rotates, in (0, 1]."""
    section = _section(fields)
    holder = section if section.has(PARTIAL) else fields
    part = holder.number(PARTIAL, default=1.0)
    if part > 1:
        holder.refuse(PARTIAL, expected="at most 1.0")
    return part


def parse_rope(fields: Fields, kind: str, *, rotary_dim: int, max_position_embeddings: int) -> Rope:
    """Returns the rope of one layer type (`kind`), which has parameters of its own in some
    files.
    """
    section = _section(fields)
    is_nested = any(section.has(name) for name in LAYER_KINDS)
    has_own_theta = kind == SLIDING and fields.has(LOCAL_THETA)
    rope = section.section(kind) if is_nested or has_own_theta else section
    if is_nested and rope.number(PARTIAL, default=1.0) != 1.0:
        rope.refuse(PARTIAL, expected="1.0: parts that differ between layers are unsupported")
    theta = _theta(fields, rope, beside=LOCAL_THETA if has_own_theta else THETA)
    kind_of_rope = rope.text("rope_type", default=rope.text("type", default="default"))
    trained_len = _original_len(fields, rope, default=max_position_embeddings)
    match kind_of_rope:
        case "default":
            return DefaultRope(theta)
        case "mrope" if rope.has(SECTIONS):  # Qwen2-VL: see rope_axes
            return DefaultRope(theta)
        case "linear":
            return LinearRope(theta, _factor(rope))
        case "dynamic":
            return DynamicRope(theta, _factor(rope), max_position_embeddings)
        case "yarn":
            return _yarn(rope, theta, trained_len, max_position_embeddings=max_position_embeddings)
        case "llama3":
            return _llama3(rope, theta, trained_len)
        case "longrope" | "su":  # the first checkpoints call it "su"
            ratio = max_position_embeddings / trained_len
            return _longrope(rope, theta, trained_len, ratio=ratio, half=rotary_dim // 2)
        case _:
            rope.refuse("rope_type" if rope.has("rope_type") else "type", expected=SUPPORTED)


def query_scale(fields: Fields) -> QueryScale | None:
    """Returns the factors of queries by position, which stand beside a rope's parameters."""
    section = _section(fields)
    if not section.has(BETA):
        return None
    original_len = section.integer("original_max_position_embeddings")
    return QueryScale(section.number(BETA), original_len)


def longest_context(rope: Rope, max_position_embeddings: int) -> int:
    """Returns the number of positions for which the frequencies are made."""
    match rope:
        case LinearRope(factor=factor) | DynamicRope(factor=factor):
            return int(max_position_embeddings * factor)
        case YarnRope(factor=factor, original_len=trained_len):
            return max(max_position_embeddings, int(trained_len * factor))
        case Llama3Rope(factor=factor, original_len=trained_len):
            return max(max_position_embeddings, int(trained_len * factor))
        case NoRope() | DefaultRope() | LongRope():
            return max_position_embeddings


def rope_axes(fields: Fields, *, num_pairs: int, axes: int) -> tuple[int, ...]:
    """Returns the position axis of each rotary pair. `mrope_section` says how many pairs each axis
    has: one axis after the other, or with `mrope_interleaved` in turns for as long as they last.
    """
    section = _section(fields)
    counts = section.integers(SECTIONS)
    if len(counts) != axes or sum(counts) != num_pairs or min(counts) < 0:
        expected = f"{axes} numbers whose sum is {num_pairs}, the rotary pairs of a head"
        section.refuse(SECTIONS, expected=expected)
    if not section.flag("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    turns = (pair % axes for pair in range(num_pairs))
    return tuple(axis if pair < counts[axis] * axes else 0 for pair, axis in enumerate(turns))


def _section(fields: Fields) -> Fields:
    return fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def _theta(fields: Fields, rope: Fields, *, beside: str) -> float:
    """theta, from the rope section or from the field `beside` it."""
    holder, name = (rope, THETA) if rope.has(THETA) else (fields, beside)
    theta = holder.number(name, default=DEFAULT_THETA)
    if theta <= 1:
        holder.refuse(name, expected="more than 1")
    return theta


def _original_len(fields: Fields, rope: Fields, *, default: int) -> int:
    """Returns the length of the original training. A field beside the rope section wins over one in
    it.
    """
    name = "original_max_position_embeddings"
    in_rope = rope.integer(name, default=default, minimum=2)
    return fields.integer(name, default=in_rope, minimum=2)


def _factor(rope: Fields, *, default: float | None = None) -> float:
    """Returns by how much the context is longer than that of the training."""
    factor = rope.number("factor", default=default)
    if factor > MAX_INT32:
        rope.refuse("factor", expected=f"at most {MAX_INT32}")
    return factor


def _yarn(rope: Fields, theta: float, trained_len: int, *, max_position_embeddings: int) -> Rope:
    if rope.has("short_factor"):
        rope.refuse("short_factor", expected="none: factors for each frequency are longrope's")
    factor = _factor(rope, default=max_position_embeddings / trained_len)
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
    """Returns the factor on cos and sin: 0.1 * mscale * ln(factor) + 1 (YaRN, 2023)."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.has("mscale") and rope.has("mscale_all_dim"):
        return temperature(rope.number("mscale")) / temperature(rope.number("mscale_all_dim"))
    return temperature(1.0)


def _llama3(rope: Fields, theta: float, trained_len: int) -> Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        rope.refuse("high_freq_factor", expected=f"more than low_freq_factor, which is {low}")
    return Llama3Rope(theta, _factor(rope), trained_len, low, high)


def _longrope(rope: Fields, theta: float, trained_len: int, *, ratio: float, half: int) -> Rope:
    factor = _factor(rope, default=ratio)
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
