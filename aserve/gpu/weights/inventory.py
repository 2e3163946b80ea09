"""What a model needs (the first of the two sources it is built from), and how a checkpoint fits it.

It reads no values. Written by the model that is built from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.linear import Linear, LinearOp
from aserve.gpu.layers.ops import PLAIN
from aserve.gpu.weights.checkpoint import DTYPES, Checkpoint, listed

# Some checkpoints carry tables that follow from the configuration.
DERIVED = ".rotary_emb.inv_freq"


class Inventory:
    """Hands out tensors without storage, and notes the names and shapes that were asked for."""

    __slots__ = ("copies", "device", "dtype", "elementwise", "numbers", "shapes")

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("meta")
        self.dtype = dtype
        self.elementwise = PLAIN
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.numbers: set[str] = set()  # of one value each: may be there, need not
        self.copies: dict[str, tuple[int, ...]] = {}  # of tied weights: may be there, need not

    def tensor(self, name: str, shape: tuple[int, ...], *, offset: float = 0.0) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        self.numbers.update(names)
        return default

    def linear(self, parts: Mapping[str, int], *, in_features: int, bias: bool) -> LinearOp:
        for name, num_rows in parts.items():
            self.shapes[f"{name}.weight"] = (num_rows, in_features)
            if bias:
                self.shapes[f"{name}.bias"] = (num_rows,)
        num_rows = sum(parts.values())
        return Linear(torch.empty(num_rows, in_features, dtype=self.dtype, device=self.device))

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        self.copies[f"{name}.weight"] = tuple(weight.shape)
        return Linear(weight)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def size_bytes(self) -> int:
        """Of all weights in the model's dtype."""
        return self.num_weights * self.dtype.itemsize


def check_fit(inventory: Inventory, checkpoint: Checkpoint) -> None:
    """One error that names everything that is missing, left over, or of another shape or kind."""
    known = {**inventory.copies, **inventory.shapes}
    stored = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if not name.endswith(DERIVED) and name not in inventory.numbers
    }
    complaints = []
    if missing := inventory.shapes.keys() - stored.keys():
        complaints.append(f"missing: {listed(missing)}")
    if unexpected := stored.keys() - known.keys():
        complaints.append(f"unexpected: {listed(unexpected)}")
    misshapen = [
        f"{name} is {_text(stored[name].shape)} instead of {_text(shape)}"
        for name, shape in known.items()
        if name in stored and stored[name].shape != shape
    ]
    if misshapen:
        complaints.append(f"of another shape: {listed(misshapen)}")
    unreadable = [
        f"{name} is {stored[name].dtype}"
        for name in known
        if name in stored and stored[name].dtype not in DTYPES
    ]
    if unreadable:
        complaints.append(f"of a type that is not read: {listed(unreadable)}")
    if complaints:
        found = "; ".join(complaints)
        raise ConfigError(f"the weights in {checkpoint.directory} don't fit its config: {found}")


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
