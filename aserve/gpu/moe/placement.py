"""Places the copies of experts, so that every rank gets about as many tokens.

The balancer of DeepSeek-V3 in its global form, https://github.com/deepseek-ai/EPLB: first the
expert with the most tokens per copy gets one more copy, until all slots are used; then the copies,
those with the most tokens first, go each to the rank with the fewest tokens that has a free slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def copies_of(loads: Sequence[int], num_slots: int) -> list[int]:
    """Returns how many copies each expert gets. `loads` are tokens per expert."""
    copies = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        heaviest = max(range(len(loads)), key=lambda expert: loads[expert] / copies[expert])
        copies[heaviest] += 1
    return copies


def balanced(loads: Sequence[int], *, num_slots: int, num_ranks: int) -> tuple[int, ...]:
    """Returns the expert in each slot. Rank r has the r-th part of the slots."""
    num_own = num_slots // num_ranks
    items = [
        (load / count, expert)
        for expert, (load, count) in enumerate(zip(loads, copies_of(loads, num_slots), strict=True))
        for _ in range(count)
    ]
    items.sort(key=lambda item: -item[0])
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for load, expert in items:
        free = (rank for rank in range(num_ranks) if len(ranks[rank]) < num_own)
        rank = min(free, key=lambda rank: sums[rank])
        ranks[rank].append(expert)
        sums[rank] += load
    return tuple(expert for own in ranks for expert in own)


def balancedness(loads: Sequence[int], slots: Sequence[int], *, num_ranks: int) -> float:
    """Returns the mean of the ranks' tokens over their maximum; 1 is balanced. The copies of an
    expert share its tokens."""
    copies = np.bincount(slots, minlength=len(loads))
    by_slot = np.array([loads[expert] / copies[expert] for expert in slots])
    by_rank = by_slot.reshape(num_ranks, -1).sum(axis=1)
    return float(by_rank.mean() / by_rank.max()) if by_rank.max() else 1.0
