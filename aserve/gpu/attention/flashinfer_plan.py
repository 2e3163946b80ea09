"""What FlashInfer is told of one forward, and the arrays of the host that its plans are made from.

It knows no wrapper's making, and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from aserve.gpu.attention.capabilities import AttentionSite
from aserve.gpu.attention.flashinfer_cascade import NO_CASCADE, CascadePlan
from aserve.gpu.attention.flashinfer_wrappers import Arrays, Problem, Wrapper
from aserve.gpu.attention.page_lists import PageList, list_pages
from aserve.gpu.attention.plan_slots import PlanSlot
from aserve.messages import ArrayI32

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
    spans: ArrayI32,
    problems: Iterable[Problem],
) -> dict[int, Arrays]:
    """lens, spans [rows]: KV lengths with this forward's tokens, and how many those are -> in the
    slot's memory, by layer group that the problems are of."""
    page_size = site.pools.page_size
    query_starts = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(spans, out=query_starts[1:])
    listed = {
        group: list_pages(lens, spans, window=site.windows[group], page_size=page_size)
        for group in {problem.group for problem in problems}
    }
    named = {"query_starts": query_starts}
    for group, own in listed.items():
        named[f"starts{group}"] = own.starts
        named[f"last_lens{group}"] = own.last_lens
        named[f"lens{group}"] = own.lens
    host = slot.write(named)
    return {
        group: Arrays(
            host["query_starts"],
            host[f"starts{group}"],
            host[f"last_lens{group}"],
            host[f"lens{group}"],
        )
        for group in listed
    }
