"""The cache as a dictionary of prefixes: says by search what KvCache says by counters and orders.

It knows which pages are there and which are in use, but not their numbers, and evicts by looking at
every entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Path = tuple[str, ...]  # the namespace, then a symbol for each page


@dataclass
class Entry:
    """One cached page index: per group whether the page is there, who uses it, and when the last
    use ended.
    """

    is_there: list[bool]
    users: list[set[int]]
    last_use: list[int]


@dataclass
class NaiveAllocation:
    name: int
    path: Path
    num_nodes: int = 0
    is_inserting: bool = True
    held: list[list[bool]] = field(default_factory=list)  # per group and page index

    @property
    def num_pages(self) -> int:
        return len(self.held[0])


class NaiveCache:
    def __init__(self, totals: list[int], windows: list[int | None], page_size: int) -> None:
        self.totals = totals
        self.windows = windows
        self.page_size = page_size
        self.groups = range(len(totals))
        self.entries: dict[Path, Entry] = {}
        self.clock = 0

    # ---------------------------------------------------------------- operations

    def match(self, path: Path) -> int:
        """The longest prefix with every page that its next position sees, tried from the longest
        down.
        """
        for num_pages in range(len(path) - 1, 0, -1):
            prefixes = [path[: index + 2] for index in range(num_pages)]
            if all(
                prefix in self.entries
                and all(self.entries[prefix].is_there[g] for g in self.seen_in(num_pages, index))
                for index, prefix in enumerate(prefixes)
            ):
                return num_pages
        return 0

    def open(self, name: int, path: Path, num_pages: int) -> NaiveAllocation:
        allocation = NaiveAllocation(name, path, num_nodes=num_pages)
        allocation.held = [
            [g in self.seen_in(num_pages, index) for index in range(num_pages)] for g in self.groups
        ]
        for group in self.groups:
            for index in range(num_pages):
                if allocation.held[group][index]:
                    self.entries[path[: index + 2]].users[group].add(name)
        return allocation

    def grow(
        self, allocation: NaiveAllocation, num_pages: int, others: list[NaiveAllocation]
    ) -> None:
        count = num_pages - allocation.num_pages
        for group in self.groups:
            while self.num_free(group, [allocation, *others]) < count:
                self.evict(group)
            allocation.held[group] += [True] * count

    def commit(self, allocation: NaiveAllocation, num_pages: int) -> None:
        while allocation.is_inserting and allocation.num_nodes < num_pages:
            path = allocation.path[: allocation.num_nodes + 2]
            if path in self.entries:
                allocation.is_inserting = False
            else:
                self.insert(allocation, path)

    def release_behind(self, allocation: NaiveAllocation, committed_len: int) -> None:
        for group, window in enumerate(self.windows):
            for index in range(allocation.num_pages):
                last_position = (index + 1) * self.page_size - 1
                is_seen = window is None or last_position > committed_len - window
                if allocation.held[group][index] and not is_seen:
                    allocation.held[group][index] = False
                    if index < allocation.num_nodes:
                        self.end_use(allocation, group, index)

    def close(self, allocation: NaiveAllocation, num_pages: int) -> None:
        while allocation.num_nodes < num_pages:
            path = allocation.path[: allocation.num_nodes + 2]
            if path not in self.entries:
                self.insert(allocation, path)
                continue
            entry = self.entries[path]
            for group in self.groups:
                if allocation.held[group][allocation.num_nodes]:
                    entry.is_there[group] = True
                    entry.users[group].add(allocation.name)
            allocation.num_nodes += 1
        for index in reversed(range(allocation.num_nodes)):
            for group in self.groups:
                if allocation.held[group][index]:
                    self.end_use(allocation, group, index)

    def evict_all(self) -> None:
        for group in self.groups:
            while self.num_evictable(group):
                self.evict(group)

    # ---------------------------------------------------------------- questions

    def seen_in(self, num_pages: int, index: int) -> list[int]:
        """Groups in which the position after `num_pages` whole pages sees page `index`."""
        next_position = num_pages * self.page_size
        last_position = (index + 1) * self.page_size - 1
        return [
            group
            for group, window in enumerate(self.windows)
            if window is None or last_position > next_position - window
        ]

    def num_free(self, group: int, allocations: list[NaiveAllocation]) -> int:
        cached = sum(entry.is_there[group] for entry in self.entries.values())
        private = sum(
            sum(allocation.held[group][allocation.num_nodes :]) for allocation in allocations
        )
        return self.totals[group] - cached - private

    def num_evictable(self, group: int) -> int:
        return sum(
            entry.is_there[group] and not entry.users[group] for entry in self.entries.values()
        )

    # ---------------------------------------------------------------- inside

    def insert(self, allocation: NaiveAllocation, path: Path) -> None:
        held = [allocation.held[group][allocation.num_nodes] for group in self.groups]
        users: list[set[int]] = [{allocation.name} if is_held else set() for is_held in held]
        self.entries[path] = Entry(held, users, [0] * len(held))
        allocation.num_nodes += 1

    def end_use(self, allocation: NaiveAllocation, group: int, index: int) -> None:
        self.clock += 1
        entry = self.entries[allocation.path[: index + 2]]
        entry.users[group].remove(allocation.name)
        entry.last_use[group] = self.clock

    def evict(self, group: int) -> None:
        """Group 0 gives up the leaf whose last use ended first, another group any such page of its
        own.
        """
        candidates = [
            path
            for path, entry in self.entries.items()
            if entry.is_there[group] and not entry.users[group] and (group or self.is_leaf(path))
        ]
        oldest = min(candidates, key=lambda path: self.entries[path].last_use[group])
        if group == 0:
            del self.entries[oldest]
        else:
            self.entries[oldest].is_there[group] = False

    def is_leaf(self, path: Path) -> bool:
        return not any(other[:-1] == path for other in self.entries)
