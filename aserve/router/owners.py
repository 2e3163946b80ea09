"""Remembers which replica has the state behind an id: a response, a stream, a file, a batch.

Ids are learned from the answers that create them. The memory is bounded; a replica is asked for an
id that has been forgotten, like all others.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable

MAX_IDS = 1 << 17
ID = re.compile(rb'"(?:id|rid|request_id)"\s*:\s*"([^"\\]{8,128})"')
PATH_ID = re.compile(
    r"/(?:v1/)?(?:responses|conversations|files|batches|streams|requests|chat/completions)"
    r"/([^/?]{8,128})"
)


class Owners:
    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._max_ids = max_ids
        self._replica_of: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replica_of)

    def learn(self, ids: Iterable[str], replica: str) -> None:
        """Notes that the replica has made these ids. The first one to make an id keeps it."""
        for each in ids:
            self._replica_of.setdefault(each, replica)
            self._replica_of.move_to_end(each)
        while len(self._replica_of) > self._max_ids:
            self._replica_of.popitem(last=False)

    def find(self, ids: Iterable[str]) -> str:
        """Returns the replica of the first known id, or an empty text."""
        found = (self._replica_of.get(each) for each in ids)
        return next(filter(None, found), "")

    def forget(self, replica: str) -> None:
        """Forgets the ids of a replica that has left."""
        gone = [each for each, owner in self._replica_of.items() if owner == replica]
        for each in gone:
            del self._replica_of[each]


def id_in_path(path: str) -> str:
    """Returns the id in a path like /v1/responses/ID, or an empty text."""
    found = PATH_ID.match(path)
    return found[1] if found else ""


def ids_in(piece: bytes) -> list[str]:
    """Returns the ids in the first bytes of an answer."""
    return [each.decode("utf-8", "replace") for each in ID.findall(piece[:4096])]
