"""Remembers which prompt prefixes each replica has computed, as an estimate of its prefix cache.

A prompt is cut into blocks of bytes, and the digest of a block covers all bytes before it too, so
equal digests mean equal prefixes. Each replica has an LRU list of digests of a fixed size: memory
is bounded, and old prompts leave the estimate as they leave the replica's own cache.

`PrefixIndex` alone writes the lists.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set
from hashlib import blake2b

BLOCK_BYTES = 256
MAX_BLOCKS = 1024  # of one prompt; what lies behind them does not decide
DIGEST_BYTES = 8


def block_digests(prompt: bytes) -> tuple[bytes, ...]:
    """Returns one digest per whole block of the prompt, each over all bytes up to its end."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    digests = []
    end = min(len(prompt) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES
    for start in range(0, end, BLOCK_BYTES):
        hasher.update(prompt[start : start + BLOCK_BYTES])
        digests.append(hasher.digest())
    return tuple(digests)


NOTHING: frozenset[str] = frozenset()


class PrefixIndex:
    """`max_blocks` is the number of blocks that are remembered for one replica."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._seen: dict[str, OrderedDict[bytes, None]] = {}
        self._holders: dict[bytes, set[str]] = {}  # the replicas by block

    def num_blocks(self, replica: str) -> int:
        return len(self._seen.get(replica, ()))

    def holders(self, digest: bytes) -> Set[str]:
        """Returns the replicas that have computed a block."""
        return self._holders.get(digest, NOTHING)

    def match_len(self, replica: str, digests: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a prompt the replica has computed before."""
        for number, digest in enumerate(digests):
            if replica not in self._holders.get(digest, NOTHING):
                return number
        return len(digests)

    def add(self, replica: str, digests: Sequence[bytes]) -> None:
        """Notes that the replica computes a prompt.

        WHY: the last block is noted first, so that eviction takes the ends of prompts before their
        beginnings; a prefix without its beginning matches nothing.
        """
        seen = self._seen.setdefault(replica, OrderedDict())
        for digest in reversed(digests):
            seen[digest] = None
            seen.move_to_end(digest)
            self._holders.setdefault(digest, set()).add(replica)
        while len(seen) > self._max_blocks:
            self._drop(replica, seen.popitem(last=False)[0])

    def forget(self, replica: str) -> None:
        """Forgets a replica that has ended: its cache is empty when it comes back."""
        for digest in self._seen.pop(replica, ()):
            self._drop(replica, digest)

    def _drop(self, replica: str, digest: bytes) -> None:
        holders = self._holders[digest]
        holders.discard(replica)
        if not holders:
            del self._holders[digest]
