"""The plan of a captured forward once more, in one call.

A wrapper's `plan` copies host arrays to the device, which a captured forward computes there by
itself, makes others from them, and calls its compiled planner. Only that last call has to be made
before each replay. It knows no forward.
Source: flashinfer/decode.py of 0.6.3 and of 0.7.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

Replan: TypeAlias = Callable[[], object]


class _Planner(Protocol):
    """What was compiled for wrappers that are alike; they share it."""

    plan: Callable[..., object]


class _Planned(Protocol):
    """A wrapper that has planned."""

    _cached_module: _Planner


def call_of_planner(
    wrapper: object, plan: Replan, fills: Iterable[Callable[[], object]]
) -> Replan | None:
    """The compiled planner's call in `plan`, by which `wrapper` plans from arrays of the host. Each
    of `fills` puts other numbers there. None where that call takes anything else that depends on
    them, or where there is none.

    WHY not by its arguments' names: they are the package's own, and releases add to them. So they
    are noted, and are the right ones if they stay the same while the numbers do not: then it is the
    arrays themselves in which the planner finds what is there when it is called.
    """
    plan()
    noted: list[partial[object]] = []
    try:
        planner = cast(_Planned, wrapper)._cached_module
        for fill in fills:
            fill()
            noted += _noted(planner, plan)
    except (AttributeError, TypeError):
        return None
    return noted[0] if noted and all(_are_alike(noted[0], call) for call in noted) else None


def _noted(planner: _Planner, plan: Replan) -> list[partial[object]]:
    """The calls of its planner, each to be made again."""
    calls: list[partial[object]] = []
    real = planner.plan

    def noting(*args: object, **named: object) -> object:
        calls.append(partial(real, *args, **named))
        return calls[-1]()

    planner.plan = noting
    try:
        plan()
    finally:
        planner.plan = real
    return calls


def _are_alike(first: partial[object], second: partial[object]) -> bool:
    if len(first.args) != len(second.args) or first.keywords.keys() != second.keywords.keys():
        return False
    named = ((first.keywords[name], second.keywords[name]) for name in first.keywords)
    return all(_is_same(*pair) for pair in (*zip(first.args, second.args, strict=True), *named))


def _is_same(first: object, second: object) -> bool:
    """NOTE: no values of the device's are compared: the host would wait for them."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and first == second
    if first is second:
        return True
    return first.device.type == second.device.type == "cpu" and torch.equal(first, second)
