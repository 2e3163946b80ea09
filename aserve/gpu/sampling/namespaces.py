"""The namespaces of rows on the device: a key that tells them apart, and a share of the tables in
which the rows of a namespace leave something for one another.

The namespaces are those of the prefix cache, which separates API keys, cache salts, LoRA adapters
and what came before a flush. One that needs a share takes it from the one whose last row began
first, so `NUM_SHARES` namespaces cannot take anything from each other.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

NUM_SHARES = 16  # besides share 0, which is for padding


class NamespaceShares:
    """Written by `init_columns` only, on the thread that stages steps."""

    __slots__ = ("_columns",)

    def __init__(self) -> None:
        self._columns: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def columns(self, namespace: str) -> tuple[int, int]:
        """Returns the key of a namespace, an int64, and its share."""
        found = self._columns.get(namespace)
        if found is None:
            share = 1 + len(self._columns)
            if share > NUM_SHARES:
                _, (_, share) = self._columns.popitem(last=False)
            digest = blake2b(namespace.encode(), digest_size=8).digest()
            found = self._columns[namespace] = int.from_bytes(digest, "little", signed=True), share
        self._columns.move_to_end(namespace)
        return found
