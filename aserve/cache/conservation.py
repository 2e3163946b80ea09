"""Checks that every page is free, in the tree, or in one allocation, and that all counts agree.

It changes nothing and keeps no state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from aserve.cache.allocation import PageAllocation
from aserve.cache.pools import PagePool
from aserve.cache.prefix_tree import PrefixTree, Run
from aserve.errors import BugError


def check_conservation(
    pools: Sequence[PagePool], tree: PrefixTree, *, allocations: Sequence[PageAllocation]
) -> None:
    for number, allocation in enumerate(allocations):
        _check_allocation(allocation, tree, number=number)
    _check_runs(tree)
    _check_users(tree, allocations=allocations)
    _check_order(tree)
    for group, pool in enumerate(pools):
        _check_owners(group, pool, tree=tree, allocations=allocations)
    for group in tree.windowed:
        _check_locks(group, tree, allocations=allocations)


def _check_allocation(allocation: PageAllocation, tree: PrefixTree, *, number: int) -> None:
    """Its lists have equal lengths, and its shared pages are those of its prefix in the tree."""
    story = f"allocation {number}"
    _require(
        {len(pages) for pages in allocation.pages} == {allocation.num_pages},
        f"{story} covers {[len(pages) for pages in allocation.pages]} pages in its groups, not "
        f"{allocation.num_pages}",
    )
    _require(
        0 not in allocation.pages[0], f"{story} lacks a page in group 0: {allocation.pages[0]}"
    )
    _require(
        allocation.num_shared <= allocation.num_pages,
        f"{story} has {allocation.num_shared} nodes for {allocation.num_pages} pages",
    )
    nodes = tree.nodes(allocation.prefix)
    _require(len(nodes) == allocation.num_shared, f"{story}: its prefix has {len(nodes)} nodes")
    for index, node in enumerate(nodes):
        where = f"{story}, page index {index}"
        page = allocation.pages[0][index]
        _require(page == node, f"{where}: page {page} in group 0, the tree has {node}")
        for group, windowed in tree.windowed.items():
            page = allocation.pages[group][index]
            known = int(windowed.pages[node])
            _require(
                page in (0, known), f"{where}: page {page} in group {group}, the tree has {known}"
            )


def _check_runs(tree: PrefixTree) -> None:
    for run in tree:
        where = f"the run of {run.keys[0].hex()}"
        _require(len(run.keys) == len(run.pages), f"{where} has {len(run.keys)} keys")
        _require(all(tree.get(key) is run for key in run.keys), f"{where} has a key of another run")
        _require(
            run.locked_end == max(run.users, default=run.start),
            f"{where} is locked up to {run.locked_end}, its users are {run.users}",
        )
        _require(run.locked_end <= run.end, f"{where} is locked beyond its end, {run.end}")
        has_parent = run.start == 0 if run.parent is None else run.parent.end >= run.start
        _require(has_parent, f"{where} begins at {run.start}: the node before it was evicted")


def _check_users(tree: PrefixTree, *, allocations: Sequence[PageAllocation]) -> None:
    """The users of a run are allocations, and child runs that have users themselves."""
    users: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for allocation in allocations:
        if allocation.num_shared:
            users[id(allocation.prefix.run)][allocation.num_shared] += 1
    for run in tree:
        if run.users and run.parent is not None:
            users[id(run.parent)][run.start] += 1
    for run in tree:
        found = dict(users[id(run)])
        _require(
            run.users == found,
            f"the run of {run.keys[0].hex()} has the users {run.users}, but {found} use it",
        )


def _check_order(tree: PrefixTree) -> None:
    """Exactly the unlocked nodes are evictable, and a node comes after its descendants."""
    places = {node: place for place, node in enumerate(tree.order.in_order())}
    _require(len(places) == len(tree.order), "group 0 counts its evictable pages wrongly")
    for run in tree:
        where = f"the run of {run.keys[0].hex()}"
        for index, node in enumerate(run.pages, run.start):
            _require(
                (node in places) == (index >= run.locked_end),
                f"{where}, node {node}: locked is {index < run.locked_end}, but evictable is "
                f"{node in places}",
            )
        chain = [places[node] for node in _upwards(run) if node in places]
        _require(chain == sorted(chain), f"{where} would be evicted after its parent")
    num_nodes = sum(len(run.pages) - (run.locked_end - run.start) for run in tree)
    _require(num_nodes == len(places), "evictable pages of group 0 belong to no node")


def _upwards(run: Run | None) -> Iterator[int]:
    """Yields the nodes from the last one of a run to the root."""
    end = 0 if run is None else run.end
    while run is not None:
        yield from reversed(run.span(run.start, end))
        end, run = run.start, run.parent


def _check_owners(
    group: int, pool: PagePool, *, tree: PrefixTree, allocations: Sequence[PageAllocation]
) -> None:
    """Each of the pages 1..num_pages - 1 has one owner, and no other page has one."""
    owners: defaultdict[int, list[str]] = defaultdict(list)
    for page in pool.free_pages():
        owners[page].append("free")
    for run in tree:
        for key, node in zip(run.keys, run.pages, strict=True):
            page = node if group == 0 else int(tree.windowed[group].pages[node])
            if page:
                owners[page].append(f"prefix {key.hex()}")
    for number, allocation in enumerate(allocations):
        num_shared = allocation.num_shared
        for index, page in enumerate(allocation.pages[group][num_shared:], num_shared):
            if page:
                owners[page].append(f"allocation {number}, page index {index}")
    for page in sorted({*owners, *range(1, pool.num_pages)}):
        _require(
            len(owners[page]) == 1 and 0 < page < pool.num_pages,
            f"group {pool.name!r}: page {page} of {pool.num_pages} is owned by {owners[page]}",
        )


def _check_locks(group: int, tree: PrefixTree, *, allocations: Sequence[PageAllocation]) -> None:
    """A windowed page has one lock per allocation that uses it, and is evictable without any."""
    users: Counter[int] = Counter()
    for allocation in allocations:
        pages = allocation.pages[group][: allocation.num_shared]
        users.update(node for node, page in zip(allocation.pages[0], pages, strict=False) if page)
    windowed = tree.windowed[group]
    unlocked = set(windowed.order.in_order())
    _require(len(unlocked) == len(windowed.order), f"group {group} counts its pages wrongly")
    for run in tree:
        for node in run.pages:
            page, locks = int(windowed.pages[node]), int(windowed.locks[node])
            where = f"node {node}, page {page} of group {group}"
            _require(
                not page or locks == users[node],
                f"{where}: {locks} locks, but {users[node]} allocations use it",
            )
            _require(
                (node in unlocked) == (page != 0 and not locks),
                f"{where}: {locks} locks, but evictable is {node in unlocked}",
            )
            unlocked.discard(node)
    _require(not unlocked, f"group {group}: {len(unlocked)} evictable pages belong to no node")


def _require(condition: bool, story: str) -> None:
    if not condition:
        raise BugError(story)
