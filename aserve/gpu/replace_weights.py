"""Copies the weights of one model into another one of the same configuration, in place.

The two are walked side by side: what is a tensor in one is a tensor of the same shape in the other.
Weights that a library packed into a format of its own cannot be written to, so these are exchanged.
Nothing but the layer that uses such a weight refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.lora.tables import LoraLinear

OURS = "aserve.gpu."  # only objects of these modules hold weights
# Attributes by which layers reach other ranks. What is there is on its way, and no weight.
TRAFFIC = frozenset({"dispatcher", "ranks", "_ranks"})

Copy: TypeAlias = Callable[[], object]
Values: TypeAlias = Tensor | np.ndarray[Any, Any]


@runtime_checkable
class HasOwnForm(Protocol):
    """A layer whose weight has numbers beside its arrays, of which compiled steps have copies."""

    def in_own_form(self, new: Any, /) -> object:
        """Returns the layer `new` with the numbers of this one. Raises ConfigError."""


def copies(old: object, new: object) -> Iterator[Copy]:
    """Yields the copies that give `old` the weights of `new`, which has no adapters. Raises
    ConfigError where the two are not alike, so make a list of them before the first copy."""
    if isinstance(old, LoraLinear):
        old = old.base
    if type(old) is not type(new):
        raise ConfigError(f"{type(old).__name__} cannot take over {type(new).__name__}")
    if isinstance(old, HasOwnForm):
        new = old.in_own_form(new)
    for name in attributes_of(old):
        yield from _copies_of(getattr(old, name), getattr(new, name), partial(setattr, old, name))


def _copies_of(old: object, new: object, rebind: Callable[[object], None]) -> Iterator[Copy]:
    if old is new:
        return  # what the two share is no weight
    if isinstance(old, torch.ScriptObject) or (isinstance(old, Tensor) and old.is_mkldnn):
        yield partial(rebind, new)
    elif isinstance(old, Tensor) and isinstance(new, Tensor):
        _check_alike(old, new)
        yield partial(old.copy_, new)
    elif isinstance(old, Tensor) or isinstance(new, Tensor):
        raise ConfigError("a weight that is not in both models cannot take over the other one")
    elif isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        _check_alike(old, new)
        yield partial(np.copyto, old, new)
    elif isinstance(old, tuple) and isinstance(new, tuple):
        for each, other in zip(old, new, strict=True):
            yield from _copies_of(each, other, rebind)
    elif isinstance(old, list) and isinstance(new, list):
        for index, (each, other) in enumerate(zip(old, new, strict=True)):
            yield from _copies_of(each, other, partial(old.__setitem__, index))
    elif isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            yield from _copies_of(value, new[key], partial(old.__setitem__, key))
    elif may_hold_weights(old):
        yield from copies(old, new)


def may_hold_weights(value: object) -> bool:
    """Returns whether it is an object of ours, or a function with given arguments, as norms on CUDA
    are."""
    return isinstance(value, partial) or type(value).__module__.startswith(OURS)


def attributes_of(value: object) -> list[str]:
    if isinstance(value, partial):
        return ["args", "keywords"]
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    names = [*(name for each in slots for name in each), *getattr(value, "__dict__", ())]
    return [name for name in names if name not in TRAFFIC]


def _check_alike(old: Values, new: Values) -> None:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ConfigError(
            f"a weight of {old.shape} and {old.dtype} cannot take over one of "
            f"{new.shape} and {new.dtype}"
        )
