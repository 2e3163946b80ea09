"""Whether a forward's attention is planned already, and for which shape.

It knows no backend: the plan itself is only carried.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """`replan_equivalent`: planning again on another shape would give what was meant. Else the plan
    holds more than the batch says, and must stay."""

    plan: object
    num_rows: int
    num_tokens: int
    replan_equivalent: bool


class PlanMarker:
    """Written by pre-planners, through their ForwardBatch."""

    __slots__ = ("record",)

    def __init__(self, record: PlanRecord | None = None) -> None:
        self.record = record
