"""The plan of one forward, the host arrays that FlashInfer's planner reads, and the search for the
planner's single call, which replans a captured forward.
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
from aserve.gpu.attention.flashinfer.page_indices import PageIndices, page_indptr
from aserve.gpu.attention.flashinfer.plan_buffers import PlanSlot
from aserve.gpu.attention.flashinfer.wrappers import LayerKind, PlanArrays, Wrapper
from aserve.messages.base import ArrayI32

Key = TypeVar("Key")
Planner = TypeVar("Planner")


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """The inputs of `bind` for one forward. Layer kinds without a wrapper use cascade attention."""

    pages: Mapping[int, PageIndices]  # by layer group, written when the forward begins
    wrappers: Mapping[LayerKind, Wrapper]
    cascade: CascadePlan = NO_CASCADE


def write_arrays(
    slot: PlanSlot[Key, Planner],
    site: AttentionSite,
    *,
    lens: ArrayI32,
    query_lens: ArrayI32,
    kinds: Iterable[LayerKind],
) -> dict[int, PlanArrays]:
    """Writes the planner's arrays to the slot's pinned memory; returns them by layer group.

    lens [rows]: KV lengths with this forward's query_lens [rows] tokens.
    """
    page_size = site.pools.page_size
    cu_query_lens = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(query_lens, out=cu_query_lens[1:])
    csr_by_group = {
        group: page_indptr(lens, query_lens, window=site.windows[group], page_size=page_size)
        for group in {kind.group for kind in kinds}
    }
    named = {"cu_query_lens": cu_query_lens}
    for group, csr in csr_by_group.items():
        named[f"indptr{group}"] = csr.indptr
        named[f"last_page_lens{group}"] = csr.last_page_lens
        named[f"lens{group}"] = csr.lens
    host = slot.write(named)
    return {
        group: PlanArrays(
            host["cu_query_lens"],
            host[f"indptr{group}"],
            host[f"last_page_lens{group}"],
            host[f"lens{group}"],
        )
        for group in csr_by_group
    }


Replan: TypeAlias = Callable[[], object]


class _Planner(Protocol):
    """The compiled module that wrappers with equal parameters share."""

    plan: Callable[..., object]


class _Planned(Protocol):
    """A wrapper after its first plan."""

    _cached_module: _Planner


def find_planner_call(
    wrapper: object, plan: Replan, fills: Iterable[Callable[[], object]]
) -> Replan | None:
    """Finds the one call of the compiled planner in `plan` that does all the work, so that it can
    be repeated without the Python around it. Returns None if there is no such call.

    `plan` runs once per entry of `fills`, each of which writes other numbers to the wrapper's host
    arrays, and the planner's arguments are recorded. The call can be repeated if its arguments are
    the same every time, because then it reads the numbers from the arrays when it is called.

    WHY: building the call from its parameters' names would break with each release of the package
    that adds parameters.
    """
    plan()
    recorded: list[partial[object]] = []
    try:
        planner = cast(_Planned, wrapper)._cached_module
        for fill in fills:
            fill()
            recorded += _recorded_calls(planner, plan)
    except (AttributeError, TypeError):
        return None
    return (
        recorded[0]
        if recorded and all(_are_alike(recorded[0], call) for call in recorded)
        else None
    )


def _recorded_calls(planner: _Planner, plan: Replan) -> list[partial[object]]:
    """Runs `plan` and returns the calls that it made of the planner, ready to be repeated."""
    calls: list[partial[object]] = []
    real = planner.plan

    def recording(*args: object, **named: object) -> object:
        calls.append(partial(real, *args, **named))
        return calls[-1]()

    planner.plan = recording
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
    """NOTE: values on the device are not compared, because the host would wait for them."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and first == second
    if first is second:
        return True
    return first.device.type == second.device.type == "cpu" and torch.equal(first, second)
