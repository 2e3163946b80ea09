"""The names and shapes of the weights that a model asks for, and whether a checkpoint has them.

An `Inventory` is the weight source of a model's first build. It reads no values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp, linear_per_expert
from aserve.gpu.layers.linear import Linear, LinearOp, prepare
from aserve.gpu.layers.ops import PLAIN
from aserve.gpu.weights.checkpoint import DTYPES, Checkpoint
from aserve.gpu.weights.files import listed
from aserve.gpu.weights.quantized import StoredBits
from aserve.gpu.weights.source import WHOLE, LinearBits, Shard, expert_parts

# Some old checkpoints carry these tables, which follow from the configuration.
DERIVED = ".rotary_emb.inv_freq"
MAX_EXPERTS = 1 << 14  # of a layer, each of which has tensors of its own


class Inventory:
    """A `WeightSource` that gives out meta tensors and notes what was asked for."""

    __slots__ = (
        "_experts",
        "_shard",
        "_tied",
        "copies",
        "device",
        "dtype",
        "elementwise",
        "linears",
        "num_weights",
        "numbers",
        "shapes",
    )

    def __init__(self, dtype: torch.dtype, shard: Shard = WHOLE) -> None:
        self._shard = shard
        self._experts: dict[str, int] = {}  # of stacks, by the name of the first expert's part
        self._tied: dict[str, int] = {}  # of such layers with another layer's weight
        self.device = torch.device("meta")
        self.dtype = dtype
        self.elementwise = PLAIN
        self.linears: dict[str, tuple[int, int]] = {}  # shapes of the weights of linear layers
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the checkpoint's tensors, by name
        self.num_weights = 0  # elements that this shard holds
        self.numbers: set[str] = set()  # names of optional scalars
        self.copies: dict[str, tuple[int, ...]] = {}  # optional copies of tied weights

    def tensor(
        self, name: str, shape: tuple[int, ...], *, offset: float = 0.0, is_wide: bool = False
    ) -> Tensor:
        self._note(name, shape)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def number(self, names: tuple[str, ...], *, default: float) -> float:
        self.numbers.update(names)
        return default

    def linear(
        self,
        parts: Mapping[str, int],
        *,
        in_features: int,
        bias: bool,
        row_order: Tensor | None = None,
    ) -> LinearOp:
        for name, num_rows in parts.items():
            self._note(f"{name}.weight", (num_rows, in_features))
            self.linears[f"{name}.weight"] = (num_rows, in_features)
            if bias:
                self._note(f"{name}.bias", (num_rows,))
        num_rows = sum(parts.values())
        return Linear(torch.empty(num_rows, in_features, dtype=self.dtype, device=self.device))

    def stacked(
        self, name: str, parts: Mapping[str, int], *, count: int, in_features: int
    ) -> Tensor:
        if count > MAX_EXPERTS:
            raise ConfigError(f"{name} has {count} experts; at most {MAX_EXPERTS} are supported")
        for expert in range(count):
            for part, num_rows in expert_parts(name, parts, expert).items():
                shape = (num_rows, in_features)
                self.shapes[f"{part}.weight"] = self._shard.whole_shape(f"{part}.weight", shape)
        num_held = len(self._shard.held_experts(count))
        for part, num_rows in expert_parts(name, parts, 0).items():
            self._experts[f"{part}.weight"] = num_held * num_rows * in_features
        held = (num_held, sum(parts.values()), in_features)
        self.num_weights += math.prod(held)
        return torch.empty(held, dtype=self.dtype, device=self.device)

    def grouped(self, weights: ExpertWeights, biases: Tensor | None = None) -> GroupedLinearOp:
        assert isinstance(weights, Tensor)
        return linear_per_expert(weights, biases, prepare)

    def tied_linear(self, name: str, weight: Tensor) -> LinearOp:
        copy = f"{name}.weight"
        self.copies[copy] = self._shard.whole_shape(copy, tuple(weight.shape))
        self._tied[copy] = weight.numel()
        return Linear(weight)

    @property
    def size_bytes(self) -> int:
        """The size of this shard's weights in the model's dtype."""
        return self.num_weights * self.dtype.itemsize

    def held_bytes(
        self, bits: LinearBits, stored_bits: Callable[[str], StoredBits | None] = lambda _name: None
    ) -> int:
        """Returns the size of this shard's weights on a device whose linear layers have `bits`, and
        experts that are not moved between ranks. A layer that is tied to another one has a copy of
        its own there if it has other bits."""
        own_bits = 8 * self.dtype.itemsize
        size_bits = float(self.num_weights * own_bits)
        sizes = {name: math.prod(shape) for name, shape in self.linears.items()}
        if not self._shard.moves_experts:
            sizes |= self._experts
        for name, size in sizes.items():
            found = bits.of(stored_bits(name))
            size_bits += size * ((own_bits if found is None else found) - own_bits)
        size_bits += sum(self._tied.values()) * (bits.every or 0)
        return math.ceil(size_bits / 8)

    def _note(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.shapes:
            self.num_weights += math.prod(shape)
        self.shapes[name] = self._shard.whole_shape(name, shape)


def check_fit(inventory: Inventory, checkpoint: Checkpoint) -> None:
    """Raises one error that names every missing and unexpected tensor, and every tensor of another
    shape or of a dtype that is not read."""
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
