"""Random lives of sequences: KvCache against a dictionary of prefixes, and against what the pages
hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aserve.cache.allocation import PageAllocation
from aserve.cache.kv_cache import KvCache
from aserve.errors import BugError
from aserve.messages.executor import GroupSpec
from tests.cache.naive_cache import NaiveAllocation, NaiveCache, Path
from tests.cache.sequences import page_keys

LONGEST = 5  # page indices of a sequence at most
SEQUENCES = ("aaaaa", "aaaab", "aaabb", "aabbb", "baaaa")  # few, so that they often meet


@dataclass
class Life:
    """One sequence: its allocation, the naive one, its keys, and how far its KV is committed."""

    allocation: PageAllocation
    naive: NaiveAllocation
    keys: list[bytes]
    committed_len: int


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 3, 4, 16]),
        totals=st.lists(st.integers(4, 12), min_size=3, max_size=3),
        window_sizes=st.lists(st.floats(0, 3), max_size=2),
    )
    def start(self, page_size: int, totals: list[int], window_sizes: list[float]) -> None:
        self.page_size = page_size
        self.windows = [None, *(1 + round(size * page_size) for size in window_sizes)]
        groups = tuple(
            GroupSpec(name=f"group{group}", num_pages=total + 1, window=window)
            for group, (total, window) in enumerate(zip(totals, self.windows, strict=False))
        )
        self.groups = range(len(groups))
        self.cache = KvCache(groups, page_size=page_size, prefix_cache=True)
        self.naive = NaiveCache(totals[: len(groups)], self.windows, page_size)
        self.lives: list[Life] = []
        self.num_opened = 0
        self.contents: dict[tuple[int, int], Path] = {}  # (group, page) -> whose KV was written

    @precondition(lambda self: len(self.lives) < 4)
    @rule(
        namespace=st.sampled_from(["", "", "salt"]),
        symbols=st.sampled_from(SEQUENCES),
        prompt_pages=st.integers(0, LONGEST),
    )
    def open(self, namespace: str, symbols: str, prompt_pages: int) -> None:
        keys = page_keys(symbols, namespace=namespace, page_size=self.page_size)
        path: Path = (namespace, *symbols)
        prefix = self.cache.match(keys[:prompt_pages])
        assert prefix.num_pages == self.naive.match(path[: prompt_pages + 1])
        life = Life(
            allocation=self.cache.open(prefix),
            naive=self.naive.open(self.num_opened, path, prefix.num_pages),
            keys=keys,
            committed_len=prefix.num_pages * self.page_size,
        )
        self.num_opened += 1
        self.lives.append(life)
        self.grow(life, prompt_pages)

    @precondition(lambda self: self.lives)
    @rule(
        data=st.data(),
        num_pages=st.integers(0, LONGEST),
        num_tokens=st.integers(-1, 1),
        is_leaving=st.booleans(),
    )
    def advance(
        self, data: st.DataObject, num_pages: int, num_tokens: int, is_leaving: bool
    ) -> None:
        """Commits that many pages and tokens more, as far as pages allow, and perhaps leaves."""
        life = data.draw(st.sampled_from(self.lives))
        wanted = life.committed_len + max(num_pages * self.page_size + num_tokens, 0)
        self.grow(life, min(-(-wanted // self.page_size), LONGEST))
        life.committed_len = min(wanted, life.allocation.num_pages * self.page_size)
        self.commit(life)
        if is_leaving:
            self.close(life)

    @precondition(lambda self: self.num_opened % 8 == 7)
    @rule()
    def evict_all(self) -> None:
        self.cache.evict_all()
        self.naive.evict_all()

    def grow(self, life: Life, num_pages: int) -> None:
        before = [list(pages) for pages in life.allocation.pages]
        missing = max(num_pages - life.allocation.num_pages, 0)
        fits = all(self.available(group) >= missing for group in self.groups)
        if not fits:
            with pytest.raises(BugError):
                self.cache.grow([life.allocation], [num_pages])
            assert [list(pages) for pages in life.allocation.pages] == before
            return
        self.cache.grow([life.allocation], [num_pages])
        if missing:
            others = [other.naive for other in self.lives if other is not life]
            self.naive.grow(life.naive, num_pages, others)
        for group, pages in enumerate(life.allocation.pages):
            assert list(pages[: len(before[group])]) == before[group]
            for index in range(len(before[group]), len(pages)):
                self.contents[group, pages[index]] = life.naive.path[: index + 2]

    def commit(self, life: Life) -> None:
        before = list(life.allocation.pages[0])
        whole = life.committed_len // self.page_size
        self.cache.commit(life.allocation, life.keys, num_pages=whole)
        self.cache.release_behind(life.allocation, life.committed_len)
        self.naive.commit(life.naive, whole)
        self.naive.release_behind(life.naive, life.committed_len)
        assert list(life.allocation.pages[0]) == before

    def close(self, life: Life) -> None:
        self.lives.remove(life)
        whole = life.committed_len // self.page_size
        self.cache.close(life.allocation, life.keys, num_pages=whole)
        self.naive.close(life.naive, whole)

    @invariant()
    def every_page_is_owned_once(self) -> None:
        self.cache.check(life.allocation for life in self.lives)

    @invariant()
    def the_accounts_are_the_naive_ones(self) -> None:
        for group in self.groups:
            total = self.naive.totals[group]
            naive_free = self.naive.num_free(group, [life.naive for life in self.lives])
            assert self.cache.num_free(group) == naive_free
            assert self.cache.num_cached(group) == self.naive.num_evictable(group)
            assert self.cache.available(group) == self.available(group)
            assert self.cache.num_used(group) + self.cache.available(group) == total

    @invariant()
    def allocations_are_the_naive_ones_and_their_pages_hold_their_own_kv(self) -> None:
        for life in self.lives:
            assert life.allocation.num_shared == life.naive.num_nodes
            assert life.allocation.is_inserting == life.naive.is_inserting
            for group, pages in enumerate(life.allocation.pages):
                assert [page != 0 for page in pages] == life.naive.held[group]
                held = [page for page in pages if page]
                assert len(set(held)) == len(held)
            for group, index, page in held_pages(life.allocation):
                assert self.contents[group, page] == life.naive.path[: index + 2]

    def available(self, group: int) -> int:
        allocations = [life.naive for life in self.lives]
        return self.naive.num_free(group, allocations) + self.naive.num_evictable(group)

    def teardown(self) -> None:
        """All leave, and nothing is lost."""
        for life in getattr(self, "lives", []):
            self.cache.close(life.allocation, life.keys, num_pages=0)
        if hasattr(self, "cache"):
            self.cache.evict_all()
            for group in self.groups:
                assert self.cache.num_free(group) == self.naive.totals[group]


def held_pages(allocation: PageAllocation) -> Iterator[tuple[int, int, int]]:
    for group, pages in enumerate(allocation.pages):
        for index, page in enumerate(pages):
            if page:
                yield group, index, page


# The large profile takes over a minute; cut off in the middle, it would look like a flaky failure.
TestCacheModel = pytest.mark.slow(pytest.mark.timeout(900)(CacheMachine.TestCase))
TestCacheModel.settings = settings(
    stateful_step_count=60, max_examples=settings().max_examples // 2
)
