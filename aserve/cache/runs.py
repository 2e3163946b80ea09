"""A run of the prefix tree: nodes that were inserted one behind the other. prefix_tree.py explains
runs, and alone writes them.
"""

from __future__ import annotations

from array import array

from aserve.errors import BugError


class Run:
    """Consecutive nodes, from page index `start` on."""

    __slots__ = ("keys", "locked_end", "pages", "parent", "start", "users")

    def __init__(self, parent: Run | None, start: int) -> None:
        self.parent = parent
        self.start = start
        self.pages: array[int] = array("i")  # of group 0, one per node
        self.keys: list[bytes] = []
        # number of users by the page index at which their prefix ends
        self.users: dict[int, int] = {}
        self.locked_end = start  # nodes before this page index are locked

    @property
    def end(self) -> int:
        return self.start + len(self.pages)

    def span(self, start: int, end: int) -> array[int]:
        """Returns the nodes of page indices start..end - 1."""
        return self.pages[start - self.start : end - self.start]

    def drop_user(self, end: int) -> None:
        left = self.users.get(end, 0) - 1
        if left < 0:
            raise BugError(f"a prefix of {end} pages was unlocked, but nobody locked it")
        if left:
            self.users[end] = left
        else:
            del self.users[end]

    def num_at_end(self, nodes: array[int], start: int) -> int:
        """Returns how many of the nodes from `start` on are the unlocked end of this run, the last
        one first.
        """
        most = min(len(nodes) - start, self.end - self.locked_end)
        tail, found = self.pages[: -most - 1 : -1], nodes[start : start + most]
        if tail == found:
            return most
        return [node == other for node, other in zip(tail, found, strict=True)].index(False)
