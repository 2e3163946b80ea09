"""The curves that `scaling` measures and `report` draws, by name.

It knows no figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Curve: TypeAlias = dict[float, float]  # y by x


@dataclass(frozen=True, slots=True)
class Axes:
    title: str
    x_label: str
    y_label: str


CURVES: Mapping[str, Axes] = {
    "decode": Axes("A decode step by its context", "tokens before it", "ms per step"),
    "prefill": Axes("A prefilled token by its prompt", "tokens of the prompt", "ms per token"),
    "host-step": Axes("A host step by its rows", "running requests", "ms per step"),
    "start": Axes("Start by the model's size", "million parameters", "seconds until ready"),
    "memory": Axes("Memory by the model's size", "million parameters", "GB resident"),
}
