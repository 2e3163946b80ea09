"""How much of their prefixes several holdings have in common: what attention may read once for all.

Knows nothing of requests or steps; keeps no state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from aserve.cache.holding import Holding


def num_shared_pages(holdings: Sequence[Holding]) -> int:
    """The leading page indices at which all of them have one page in group 0; 0 for one alone.

    Such a page is in the tree: whole, committed, and written by nobody any more. A page names its
    whole prefix, so where two holdings have the same one, all before it are the same.
    """
    if len(holdings) < 2:
        return 0
    first = holdings[0]
    num_shared = first.num_shared
    for holding in holdings[1:]:
        num_shared = _num_alike(first, holding, most=num_shared)
        if not num_shared:
            break
    return num_shared


def _num_alike(one: Holding, other: Holding, *, most: int) -> int:
    """PERF: mostly there is nothing in common, or as much as with the row before."""
    most = min(most, other.num_shared)
    left, right = one.pages[0], other.pages[0]
    if not most or left[0] != right[0]:
        return 0
    if left[most - 1] == right[most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda index: left[index] != right[index])
