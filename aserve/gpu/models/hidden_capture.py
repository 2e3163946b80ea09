"""Hidden states that one forward shall keep, besides what it returns.

It knows no model. Written by that forward alone, and good for one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class HiddenCapture:
    """`layers` gets one tensor [tokens, hidden] for each of `layer_ids`, in the order of the
    layers: the residual stream after that layer. `before_norm` gets what enters the final norm."""

    layer_ids: tuple[int, ...] = ()
    wants_before_norm: bool = False
    layers: list[Tensor] = field(default_factory=list)
    before_norm: Tensor | None = None
