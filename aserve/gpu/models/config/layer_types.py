"""Sliding windows per layer, in the three forms in which configurations state them.

A family's file calls the function that matches its configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from aserve.gpu.models.config.fields import Fields

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"  # a recurrent layer
LAYER_KINDS = (FULL, SLIDING)

Windows: TypeAlias = tuple[int | None, ...]  # per layer; None: full attention


def one_window(fields: Fields) -> Windows:
    """All layers have the window `sliding_window`, or none where it is absent."""
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return (window,) * _num_layers(fields)


def switched_windows(fields: Fields) -> Windows:
    """If `use_sliding_window` is true, the layers that `layer_types` names have the window, or else
    those from `max_window_layers` on."""
    num_layers = _num_layers(fields)
    if not fields.flag("use_sliding_window"):
        return (None,) * num_layers
    num_full = min(fields.integer("max_window_layers", minimum=0), num_layers)
    return _windows_by_kind(fields, [FULL] * num_full + [SLIDING] * (num_layers - num_full))


def periodic_windows(fields: Fields, period: int) -> Windows:
    """The layers that `layer_types` names have the window, or else all but every `period`-th."""
    numbers = range(1, _num_layers(fields) + 1)
    return _windows_by_kind(fields, [SLIDING if number % period else FULL for number in numbers])


def named_windows(fields: Fields, *, window: int, is_full: Sequence[bool]) -> Windows:
    """The layers that `layer_types` names have the window, or else all that are not full."""
    kinds = _kinds(fields, [FULL if full else SLIDING for full in is_full])
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _windows_by_kind(fields: Fields, default_kinds: Sequence[str]) -> Windows:
    kinds = _kinds(fields, default_kinds)
    if SLIDING not in kinds:
        return (None,) * len(kinds)
    window = fields.integer("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _kinds(fields: Fields, default_kinds: Sequence[str]) -> Sequence[str]:
    kinds = default_kinds
    if fields.has("layer_types"):
        kinds = fields.texts("layer_types", length=len(default_kinds))
    if not {*kinds} <= {*LAYER_KINDS}:
        fields.refuse("layer_types", expected=f"{FULL} or {SLIDING} for each layer")
    return kinds


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers")
