"""Checks that every page is free, in the tree, or in one allocation, and that all counts agree.

It changes nothing and keeps no state. PERF: debug checks run after every tick of most tests, so a
message is written only where a check fails.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from aserve.cache.allocation import PageAllocation
from aserve.cache.pools import PagePool
from aserve.cache.prefix_tree import PrefixTree
from aserve.cache.runs import Run
from aserve.cache.windowed_pages import WindowedPages
from aserve.errors import BugError


def check_conservation(
    pools: Sequence[PagePool], tree: PrefixTree, *, allocations: Sequence[PageAllocation]
) -> None:
    runs = list(tree)
    for number, allocation in enumerate(allocations):
        _check_allocation(allocation, tree, number=number)
    for run in runs:
        _check_run(run, tree)
    _check_users(runs, allocations)
    _check_order(runs, tree)
    for group, pool in enumerate(pools):
        _check_owners(group, pool, runs, tree=tree, allocations=allocations)
    for group, windowed in tree.windowed.items():
        _check_locks(group, windowed, runs, allocations=allocations)


def _check_allocation(allocation: PageAllocation, tree: PrefixTree, *, number: int) -> None:
    """Its lists have equal lengths, and its shared pages are those of its prefix in the tree."""
    story = f"allocation {number}"
    lengths = [len(pages) for pages in allocation.pages]
    if set(lengths) != {allocation.num_pages}:
        raise BugError(f"{story} covers {lengths} pages in its groups, not {allocation.num_pages}")
    if 0 in allocation.pages[0]:
        raise BugError(f"{story} lacks a page in group 0: {allocation.pages[0]}")
    num_shared = allocation.num_shared
    if num_shared > allocation.num_pages:
        raise BugError(f"{story} has {num_shared} nodes for {allocation.num_pages} pages")
    nodes = tree.nodes(allocation.prefix)
    if len(nodes) != num_shared:
        raise BugError(f"{story}: its prefix has {len(nodes)} nodes, not {num_shared}")
    for index, node in enumerate(nodes):
        page = allocation.pages[0][index]
        if page != node:
            raise BugError(
                f"{story}, page index {index}: page {page} in group 0, the tree has {node}"
            )
        for group, windowed in tree.windowed.items():
            page, known = allocation.pages[group][index], int(windowed.pages[node])
            if page not in (0, known):
                raise BugError(
                    f"{story}, page index {index}: page {page} in group {group}, the tree has "
                    f"{known}"
                )


def _name(run: Run) -> str:
    return f"the run of {run.keys[0].hex()}"


def _check_run(run: Run, tree: PrefixTree) -> None:
    if len(run.keys) != len(run.pages):
        raise BugError(f"{_name(run)} has {len(run.keys)} keys")
    if any(tree.get(key) is not run for key in run.keys):
        raise BugError(f"{_name(run)} has a key of another run")
    if run.locked_end != max(run.users, default=run.start):
        raise BugError(f"{_name(run)} is locked up to {run.locked_end}, its users are {run.users}")
    if run.locked_end > run.end:
        raise BugError(f"{_name(run)} is locked beyond its end, {run.end}")
    has_parent = run.start == 0 if run.parent is None else run.parent.end >= run.start
    if not has_parent:
        raise BugError(f"{_name(run)} begins at {run.start}: the node before it was evicted")


def _check_users(runs: Sequence[Run], allocations: Sequence[PageAllocation]) -> None:
    """The users of a run are allocations, and child runs that have users themselves."""
    users: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for allocation in allocations:
        if allocation.num_shared:
            users[id(allocation.prefix.run)][allocation.num_shared] += 1
    for run in runs:
        if run.users and run.parent is not None:
            users[id(run.parent)][run.start] += 1
    for run in runs:
        found = dict(users[id(run)])
        if run.users != found:
            raise BugError(f"{_name(run)} has the users {run.users}, but {found} use it")


def _check_order(runs: Sequence[Run], tree: PrefixTree) -> None:
    """Exactly the unlocked nodes are evictable, and a node comes after its descendants."""
    places = {node: place for place, node in enumerate(tree.order.in_order())}
    if len(places) != len(tree.order):
        raise BugError("group 0 counts its evictable pages wrongly")
    for run in runs:
        for index, node in enumerate(run.pages, run.start):
            if (node in places) != (index >= run.locked_end):
                raise BugError(
                    f"{_name(run)}, node {node}: locked is {index < run.locked_end}, but evictable "
                    f"is {node in places}"
                )
        chain = [places[node] for node in _upwards(run) if node in places]
        if chain != sorted(chain):
            raise BugError(f"{_name(run)} would be evicted after its parent")
    num_nodes = sum(len(run.pages) - (run.locked_end - run.start) for run in runs)
    if num_nodes != len(places):
        raise BugError("evictable pages of group 0 belong to no node")


def _upwards(run: Run | None) -> Iterator[int]:
    """Yields the nodes from the last one of a run to the root."""
    end = 0 if run is None else run.end
    while run is not None:
        yield from reversed(run.span(run.start, end))
        end, run = run.start, run.parent


def _check_owners(
    group: int,
    pool: PagePool,
    runs: Sequence[Run],
    *,
    tree: PrefixTree,
    allocations: Sequence[PageAllocation],
) -> None:
    """Each of the pages 1..num_pages - 1 has one owner, and no other page has one."""
    nodes = [node for run in runs for node in run.pages]
    windowed = tree.windowed.get(group)
    owned = {
        "free": list(pool.free_pages()),
        "in the tree": nodes if windowed is None else windowed.pages[nodes].tolist(),
    }
    for number, allocation in enumerate(allocations):
        owned[f"in allocation {number}"] = allocation.pages[group][allocation.num_shared :].tolist()
    pages = [page for each in owned.values() for page in each if group == 0 or page]
    if sorted(pages) == list(range(1, pool.num_pages)):
        return
    counts = Counter(pages)
    for page in sorted({*pages, *range(1, pool.num_pages)}):
        if counts[page] != 1 or not 0 < page < pool.num_pages:
            owners = [owner for owner, theirs in owned.items() for _ in range(theirs.count(page))]
            raise BugError(
                f"group {pool.name!r}: page {page} of {pool.num_pages} is owned by {owners}"
            )


def _check_locks(
    group: int,
    windowed: WindowedPages,
    runs: Sequence[Run],
    *,
    allocations: Sequence[PageAllocation],
) -> None:
    """A windowed page has one lock per allocation that uses it, and is evictable without any."""
    users: Counter[int] = Counter()
    for allocation in allocations:
        pages = allocation.pages[group][: allocation.num_shared]
        users.update(node for node, page in zip(allocation.pages[0], pages, strict=False) if page)
    unlocked = set(windowed.order.in_order())
    if len(unlocked) != len(windowed.order):
        raise BugError(f"group {group} counts its pages wrongly")
    for run in runs:
        for node in run.pages:
            page, locks = int(windowed.pages[node]), int(windowed.locks[node])
            if page and locks != users[node]:
                raise BugError(
                    f"node {node}, page {page} of group {group}: {locks} locks, but {users[node]} "
                    "allocations use it"
                )
            if (node in unlocked) != (page != 0 and not locks):
                raise BugError(
                    f"node {node}, page {page} of group {group}: {locks} locks, but evictable is "
                    f"{node in unlocked}"
                )
            unlocked.discard(node)
    if unlocked:
        raise BugError(f"group {group}: {len(unlocked)} evictable pages belong to no node")
