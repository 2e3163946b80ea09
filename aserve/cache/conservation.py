"""The proof that no page is lost or owned twice, from what pools, tree and holdings say.

Knows nothing of how pages move; changes nothing and keeps no state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from aserve.cache.holding import Holding
from aserve.cache.pages import PagePool
from aserve.cache.radix import Node, PrefixTree
from aserve.errors import BugError


def check_conservation(
    pools: Sequence[PagePool], tree: PrefixTree, *, holdings: Sequence[Holding]
) -> None:
    for number, holding in enumerate(holdings):
        _check_holding(holding, tree, number=number)
    _check_tree(tree)
    for group, pool in enumerate(pools):
        _check_owners(group, pool, tree=tree, holdings=holdings)
        _check_locks(group, tree, holdings=holdings)


def _check_holding(holding: Holding, tree: PrefixTree, *, number: int) -> None:
    """Its lists are alike, its nodes are a path from the root, and it uses their pages or none."""
    story = f"holding {number}"
    _require(
        len({len(pages) for pages in holding.pages}) == 1,
        f"{story} covers {[len(pages) for pages in holding.pages]} pages in its groups",
    )
    _require(0 not in holding.pages[0], f"{story} lacks a page in group 0: {holding.pages[0]}")
    _require(
        len(holding.nodes) <= holding.num_pages,
        f"{story} has {len(holding.nodes)} nodes for {holding.num_pages} pages",
    )
    parent: Node | None = None
    for index, node in enumerate(holding.nodes):
        where = f"{story}, page index {index}, prefix {node.key.hex()}"
        _require(tree.get(node.key) is node, f"{where}: not in the tree")
        _require(node.parent is parent, f"{where}: its parent is not the node before it")
        for group, pages in enumerate(holding.pages):
            _require(
                pages[index] in (0, node.pages[group]),
                f"{where}: page {pages[index]} in group {group}, the tree has {node.pages[group]}",
            )
        parent = node


def _check_tree(tree: PrefixTree) -> None:
    children: Counter[Node] = Counter()
    for node in tree:
        where = f"prefix {node.key.hex()}"
        _require(node.pages[0] != 0, f"{where} has no page in group 0")
        if node.parent is not None:
            children[node.parent] += 1
            _require(tree.get(node.parent.key) is node.parent, f"{where}: its parent was evicted")
            _require(
                node.parent.locks[0] >= min(node.locks[0], 1),
                f"{where} is locked, its parent is not",
            )
    for node in tree:
        _require(
            node.num_children == children[node],
            f"prefix {node.key.hex()} counts {node.num_children} children of {children[node]}",
        )
    evictable: set[Node] = set()
    for node in tree.unlocked(0):
        _require(
            node.parent is None or node.parent not in evictable,
            f"prefix {node.key.hex()} would be evicted after its parent",
        )
        evictable.add(node)


def _check_owners(
    group: int, pool: PagePool, *, tree: PrefixTree, holdings: Sequence[Holding]
) -> None:
    """Pages 1..num_pages - 1 have one owner each, and nothing else has any."""
    owners: defaultdict[int, list[str]] = defaultdict(list)
    for page in pool.free_pages():
        owners[page].append("free")
    for node in tree:
        if node.pages[group]:
            owners[node.pages[group]].append(f"prefix {node.key.hex()}, locks {node.locks}")
    for number, holding in enumerate(holdings):
        num_shared = len(holding.nodes)
        for index, page in enumerate(holding.pages[group][num_shared:], num_shared):
            if page:
                owners[page].append(f"holding {number}, page index {index}")
    for page in sorted({*owners, *range(1, pool.num_pages)}):
        _require(
            len(owners[page]) == 1 and 0 < page < pool.num_pages,
            f"group {pool.name!r}: page {page} of {pool.num_pages} has the owners {owners[page]}",
        )


def _check_locks(group: int, tree: PrefixTree, *, holdings: Sequence[Holding]) -> None:
    """A page has a lock for each holding that uses it, and is evictable if it has none."""
    users: Counter[Node] = Counter()
    for holding in holdings:
        users.update(
            node for node, page in zip(holding.nodes, holding.pages[group], strict=False) if page
        )
    unlocked = set(tree.unlocked(group))
    for node in tree:
        where = f"prefix {node.key.hex()}, page {node.pages[group]} of group {group}"
        _require(
            node.locks[group] == users[node],
            f"{where}: {node.locks[group]} locks, but {users[node]} holdings use it",
        )
        _require(
            (node in unlocked) == (node.pages[group] != 0 and not node.locks[group]),
            f"{where}: {node.locks[group]} locks, but evictable is {node in unlocked}",
        )
        unlocked.discard(node)
    _require(not unlocked, f"group {group}: {len(unlocked)} evicted prefixes wait for eviction")


def _require(condition: bool, story: str) -> None:
    if not condition:
        raise BugError(story)
