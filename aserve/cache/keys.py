"""Names of cached pages: a chain of digests, one per whole page of tokens.

A key names its page's tokens, every token before them and the namespace, so that equal keys mean
equal KV. Knows nothing of pages or of the tree; keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import overload

import numpy as np

from aserve.messages import ArrayI32, array_i32

KEY_BYTES = 16  # 2^64 pages until two of them are likely to share a key


def root_key(namespace: str) -> bytes:
    """The key before the first page: requests of different namespaces (salt, adapter, weights)
    share nothing.
    """
    return blake2b(namespace.encode(), digest_size=KEY_BYTES).digest()


def extend_keys(keys: list[bytes], tokens: ArrayI32, *, page_size: int, root: bytes) -> None:
    """Appends the keys of those whole pages of `tokens` that have none yet.

    `tokens` is int32 [sequence length], from position 0 on; `keys` are those of its first pages.
    """
    # NOTE: the same tokens in another width would get other keys, which is a cache that never hits.
    assert tokens.dtype == np.int32
    parent = keys[-1] if keys else root
    for start in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        page_tokens = tokens[start : start + page_size].tobytes()
        parent = blake2b(page_tokens, digest_size=KEY_BYTES, key=parent).digest()
        keys.append(parent)


def prompt_keys(prompt_ids: bytes, *, page_size: int, namespace: str) -> bytes:
    """The keys of a prompt's whole pages, one after the other, as an AdmitRequest carries them.

    PERF: about 1 us per page, so the tokenizer makes them beside the loop where a prompt is long.
    """
    keys: list[bytes] = []
    extend_keys(keys, array_i32(prompt_ids), page_size=page_size, root=root_key(namespace))
    return b"".join(keys)


class PageKeys(Sequence[bytes]):
    """The keys of a sequence's whole pages. Those of the prompt are shared by all children of a
    request and stay in the bytes in which they came.
    """

    __slots__ = ("_num_prompt", "_own", "_prompt", "_root")

    def __init__(self, prompt: bytes, *, root: bytes) -> None:
        self._prompt = prompt
        self._num_prompt = len(prompt) // KEY_BYTES
        self._own: list[bytes] = []
        self._root = root

    def __len__(self) -> int:
        return self._num_prompt + len(self._own)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """One key, or those of a range of pages."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index >= self._num_prompt:
            return self._own[index - self._num_prompt]
        return self._prompt[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def append(self, page_tokens: ArrayI32) -> None:
        """The key of the next page, from its tokens."""
        parent = self[len(self) - 1] if len(self) else self._root
        self._own.append(blake2b(page_tokens.tobytes(), digest_size=KEY_BYTES, key=parent).digest())

    def num_alike(self, other: PageKeys, *, start: int, stop: int) -> int:
        """How many of the first `stop` keys are those of `other`; the first `start` are."""
        low, high = start, min(stop, len(self), len(other))
        while low < high:
            middle = (low + high + 1) // 2
            if self[middle - 1] == other[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low
