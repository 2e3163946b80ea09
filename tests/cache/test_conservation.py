"""Each test breaks one thing and wants the check to tell its story."""

from array import array

import numpy as np
import pytest

from aserve.cache.allocation import PageAllocation
from aserve.cache.conservation import check_conservation
from aserve.cache.pools import PagePool
from aserve.cache.prefix_tree import Prefix, PrefixTree
from aserve.cache.runs import Run
from aserve.cache.stored_pages import StoredPages
from aserve.errors import BugError


class Parts:
    """Two groups of 6 pages; an allocation with two nodes and a private page, and an evictable node
    that branches off behind the first.
    """

    def __init__(self) -> None:
        self.pools = (PagePool("full", 7), PagePool("window", 7))
        self.tree = PrefixTree(7, windowed_groups=(1,), stored=StoredPages("off", num_groups=2))
        self.allocation = PageAllocation(2)
        for pool, pages in zip(self.pools, self.allocation.pages, strict=True):
            pages.extend(pool.take(3))
        self.allocation.num_pages = 3
        self.allocation.prefix = self.insert(Prefix(), [b"a", b"b"], pages=[1, 2])
        assert self.allocation.prefix.run is not None
        self.run: Run = self.allocation.prefix.run
        for pool in self.pools:
            pool.take(1)
        branch = self.tree.cut(self.allocation.prefix, 1)
        self.tree.lock(branch)
        self.leaf = self.insert(branch, [b"c"], pages=[4])
        self.tree.unlock(self.leaf)
        self.tree.windowed[1].unlock(np.array([4], np.int32))

    def insert(self, prefix: Prefix, keys: list[bytes], *, pages: list[int]) -> Prefix:
        return self.tree.insert(prefix, keys, pages=[array("i", pages)] * 2)

    def check(self) -> None:
        check_conservation(self.pools, self.tree, allocations=[self.allocation])


def test_what_is_right_passes() -> None:
    parts = Parts()
    parts.check()
    parts.pools[1].give_back(parts.tree.windowed[1].evict(1))
    parts.check()


def spoil(parts: Parts, how: str) -> None:
    """`how` says what is wrong then."""
    full, windowed = parts.pools
    own, own_windowed = parts.allocation.pages
    match how:
        case "a page that nobody owns":
            windowed.take(1)
        case "a free page that is held":
            full.give_back([3])
        case "a private page in the tree":
            own[2] = 4
            full.give_back([3])
        case "a page that does not exist":
            own_windowed[2] = 7
            windowed.give_back([3])
        case "a shared page that is not the tree's":
            own[1] = 3
        case "a windowed page that is not the tree's":
            own_windowed[1] = 3
        case "a gap in the full group":
            own[2] = 0
            full.give_back([3])
        case "groups of unequal length":
            windowed.give_back([own_windowed.pop()])
        case "nodes beyond the pages":
            parts.allocation.num_pages = 1
            del own[1:], own_windowed[1:]
        case "a run without its last page":
            parts.run.pages.pop()
        case "a key of another run":
            parts.run.keys[1] = b"c"
        case "a lock too many":
            parts.tree.lock(parts.leaf)
        case "a windowed lock without an allocation":
            parts.tree.windowed[1].lock(np.array([4], np.int32))
        case "a user without a lock":
            parts.tree.unlock(parts.allocation.prefix)
        case "a locked length that is no user's":
            parts.run.locked_end = 1
        case "a locked node that waits for eviction":
            parts.tree.order.add([2])
        case "a tombstone that waits for eviction":
            parts.tree.windowed[1].pages[4] = 0
            windowed.give_back([4])
        case "a parent that would be evicted first":
            parts.tree.unlock(parts.allocation.prefix)
            parts.allocation.prefix = Prefix()
            parts.tree.order.remove([4])
            parts.tree.order.add([4])
        case "a run whose parent's end was evicted":
            assert parts.leaf.run is not None
            parts.leaf.run.start = parts.leaf.run.locked_end = 3


@pytest.mark.parametrize(
    ("how", "story"),
    [
        ("a page that nobody owns", r"'window': page 5 of 7 is owned by \[\]"),
        ("a free page that is held", r"page 3 .*'free', 'in allocation 0'"),
        ("a private page in the tree", "page 4 .*'in the tree', 'in allocation 0'"),
        ("a page that does not exist", "page 7 of 7"),
        ("a shared page that is not the tree's", "index 1: page 3 in group 0, the tree has 2"),
        ("a windowed page that is not the tree's", "index 1: page 3 in group 1, the tree has 2"),
        ("a gap in the full group", "lacks a page in group 0"),
        ("groups of unequal length", r"covers \[3, 2\] pages"),
        ("nodes beyond the pages", "2 nodes for 1 pages"),
        ("a run without its last page", "its last page was evicted"),
        ("a key of another run", "the run of 61 has a key of another run"),
        ("a lock too many", "the run of .* has the users"),
        ("a windowed lock without an allocation", "page 4 of group 1: 1 locks, but 0 allocations"),
        ("a user without a lock", "the run of 61 has the users"),
        ("a locked length that is no user's", r"is locked up to 1, its users are \{2: 1\}"),
        ("a locked node that waits for eviction", "node 2: locked is True, but evictable is True"),
        ("a tombstone that waits for eviction", "group 1: 0 locks, but evictable is True"),
        ("a parent that would be evicted first", "the run of 63 would be evicted after its parent"),
        ("a run whose parent's end was evicted", "begins at 3: the node before it was evicted"),
    ],
)
def test_what_is_spoilt_is_told(how: str, story: str) -> None:
    parts = Parts()
    spoil(parts, how)
    with pytest.raises(BugError, match=story):
        parts.check()
