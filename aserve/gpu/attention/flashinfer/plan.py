"""The plan of one forward, the host arrays that FlashInfer's planner reads, and the search for the
planner's single call, which replans a captured forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class PlanPart:
    """The wrappers of some rows of a forward."""

    tokens: slice
    wrappers: Mapping[LayerKind, Wrapper]


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """The inputs of `bind` for one forward. Layer kinds without a wrapper use cascade attention."""

    pages: Mapping[int, PageIndices]  # by layer group, written when the forward begins
    parts: tuple[PlanPart, ...]
    cascade: CascadePlan = NO_CASCADE


def row_parts(query_lens: ArrayI32) -> tuple[slice, ...]:
    """Divides the rows of a mixed step into the decodes, which come first, and the others. Each
    slice of rows is that of their tokens as well, because the rows before it have one each."""
    longer = np.flatnonzero(query_lens != 1)
    num_decodes = int(longer[0]) if len(longer) else 0
    return (slice(num_decodes), slice(num_decodes, None)) if num_decodes else (ALL_ROWS,)


def write_arrays(
    slot: PlanSlot[Key, Planner],
    site: AttentionSite,
    *,
    lens: ArrayI32,
    query_lens: ArrayI32,
    kinds: Iterable[LayerKind],
    parts: Sequence[slice] = (ALL_ROWS,),
) -> list[dict[int, PlanArrays]]:
    """Writes the planner's arrays to the slot's pinned memory; returns those of each part of the
    rows by layer group.

    lens [rows]: KV lengths with this forward's query_lens [rows] tokens.
    """
    groups = sorted({kind.group for kind in kinds})
    named: dict[str, ArrayI32] = {}
    for part, rows in enumerate(parts):
        own, own_lens = query_lens[rows], lens[rows]
        cu_query_lens = named[f"cu_query_lens{part}"] = np.zeros(len(own) + 1, np.int32)
        np.cumsum(own, out=cu_query_lens[1:])
        for group in groups:
            window, page_size = site.windows[group], site.pools.page_size
            csr = page_indptr(own_lens, own, window=window, page_size=page_size)
            named[f"indptr{part}.{group}"] = csr.indptr
            named[f"last_page_lens{part}.{group}"] = csr.last_page_lens
            named[f"lens{part}.{group}"] = csr.lens
    host = slot.write(named)
    return [
        {group: _arrays(host, f"{part}", f"{part}.{group}") for group in groups}
        for part in range(len(parts))
    ]


def _arrays(host: Mapping[str, Tensor], part: str, own: str) -> PlanArrays:
    return PlanArrays(
        host[f"cu_query_lens{part}"],
        host[f"indptr{own}"],
        host[f"last_page_lens{own}"],
        host[f"lens{own}"],
    )


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
