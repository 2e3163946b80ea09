"""The KV caches of all data-parallel ranks: each rank has page pools and a prefix tree of its own.

Pools are numbered over all ranks: with G layer groups, rank r has the pools r * G to r * G + G - 1.
Where pages are counted, there is one number for each pool, so that the counts of several ranks can
be added and compared as those of one. With one rank, pools are the layer groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aserve.cache.allocation import PageAllocation
from aserve.cache.kv_cache import KvCache
from aserve.cache.prefix_tree import Prefix
from aserve.cache.state_cache import StateCache
from aserve.cache.stored_pages import StoredPages
from aserve.errors import BugError
from aserve.messages.executor import EngineSpec


class RankCaches:
    __slots__ = ("_by_pool", "_num_groups", "has_windows", "ranks", "states")

    def __init__(self, spec: EngineSpec) -> None:
        self.states = _state_cache(spec)  # the only rank's, of a model with recurrent layers
        self.ranks: tuple[KvCache, ...] = (
            (self.states,) if self.states is not None else _kv_caches(spec)
        )
        self.has_windows = self.ranks[0].has_windows
        self._num_groups = len(spec.groups)
        self._by_pool = [(cache, g) for cache in self.ranks for g in range(self._num_groups)]

    @property
    def num_pools(self) -> int:
        return len(self._by_pool)

    @property
    def stored(self) -> StoredPages:
        """Several ranks have no tiers below their prefix caches."""
        return self.ranks[0].stored

    def of(self, allocation: PageAllocation) -> KvCache:
        return self.ranks[allocation.rank]

    def pools_of(self, rank: int) -> range:
        return range(rank * self._num_groups, (rank + 1) * self._num_groups)

    def in_pools(self, rank: int, pages: tuple[int, ...]) -> tuple[int, ...]:
        """Returns one number for each pool: `pages` of the rank's layer groups, 0 of the others."""
        if len(self.ranks) == 1:
            return pages
        after = self.num_pools - (rank + 1) * self._num_groups
        return (0,) * (rank * self._num_groups) + pages + (0,) * after

    def match(self, keys: Sequence[bytes], *, most: int) -> Prefix:
        """Returns the longest prefix of at most `most` pages that some rank has."""
        found = (cache.match(keys, most=most) for cache in self.ranks)
        return max(found, key=lambda prefix: prefix.num_pages)

    def available(self, pool: int) -> int:
        cache, group = self._by_pool[pool]
        return cache.available(group)

    def num_free(self, pool: int) -> int:
        cache, group = self._by_pool[pool]
        return cache.num_free(group)

    def num_cached(self, group: int) -> int:
        """Returns the number of evictable pages of all ranks."""
        return sum([cache.num_cached(group) for cache in self.ranks])

    def num_used(self, group: int) -> int:
        """Returns the number of pages of all ranks that sequences use."""
        return sum([cache.num_used(group) for cache in self.ranks])

    def evict_all(self) -> None:
        for cache in self.ranks:
            cache.evict_all()

    def check(self, allocations: Iterable[PageAllocation]) -> None:
        """Checks every rank's cache. `allocations` are all open ones."""
        held = list(allocations)
        for rank, cache in enumerate(self.ranks):
            cache.check(allocation for allocation in held if allocation.rank == rank)


def _state_cache(spec: EngineSpec) -> StateCache | None:
    if not spec.num_checkpoints:
        return None
    if spec.dp_size > 1 or not spec.prefix_cache:
        raise BugError(f"checkpoints are for one rank that has a prefix cache: {spec}")
    return StateCache(spec.groups, page_size=spec.page_size, num_checkpoints=spec.num_checkpoints)


def _kv_caches(spec: EngineSpec) -> tuple[KvCache, ...]:
    return tuple(
        KvCache(
            spec.groups,
            page_size=spec.page_size,
            prefix_cache=spec.prefix_cache,
            rank=rank,
            tiers=spec.kv_tiers if spec.dp_size == 1 else "off",
        )
        for rank in range(spec.dp_size)
    )
