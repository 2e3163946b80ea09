"""What FlashInfer is told of one forward, and the arrays of the host that its plans are made from.

It knows no wrapper's making, and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.flashinfer.cascade import NO_CASCADE, CascadePlan
from aserve.gpu.attention.flashinfer.page_indices import PageList, list_pages
from aserve.gpu.attention.flashinfer.plan_buffers import PlanSlot
from aserve.gpu.attention.flashinfer.wrappers import Arrays, Problem, Wrapper
from aserve.messages.base import ArrayI32

Key = TypeVar("Key")
Planner = TypeVar("Planner")


@dataclass(frozen=True, slots=True)
class FlashPlan:
    lists: Mapping[int, PageList]  # by layer group, written when the forward begins
    wrappers: Mapping[Problem, Wrapper]
    cascade: CascadePlan = NO_CASCADE  # of the layers that have no wrapper


def write_arrays(
    slot: PlanSlot[Key, Planner],
    site: AttentionSite,
    *,
    lens: ArrayI32,
    query_lens: ArrayI32,
    problems: Iterable[Problem],
) -> dict[int, Arrays]:
    """lens, spans [rows]: KV lengths with this forward's tokens, and how many those are -> in the
    slot's memory, by layer group that the problems are of."""
    page_size = site.pools.page_size
    cu_query_lens = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(query_lens, out=cu_query_lens[1:])
    listed = {
        group: list_pages(lens, query_lens, window=site.windows[group], page_size=page_size)
        for group in {problem.group for problem in problems}
    }
    named = {"cu_query_lens": cu_query_lens}
    for group, own in listed.items():
        named[f"starts{group}"] = own.starts
        named[f"last_lens{group}"] = own.last_lens
        named[f"lens{group}"] = own.lens
    host = slot.write(named)
    return {
        group: Arrays(
            host["cu_query_lens"],
            host[f"starts{group}"],
            host[f"last_lens{group}"],
            host[f"lens{group}"],
        )
        for group in listed
    }


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
