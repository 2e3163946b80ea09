"""The keys of pages: digests of all tokens up to the end of a page, and of their namespace.

Two pages with one key have the same KV, in whatever engine with the same model they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import overload

import numpy as np

from aserve.messages.base import ArrayI32, array_i32

KEY_BYTES = 16  # two of 2^64 pages would probably have the same key


def root_key(namespace: str) -> bytes:
    """Returns the key before the first page, so that requests of different namespaces share no
    pages.
    """
    return blake2b(namespace.encode(), digest_size=KEY_BYTES).digest()


def extend_keys(keys: list[bytes], tokens: ArrayI32, *, page_size: int, root: bytes) -> None:
    """Appends the keys of those full pages of `tokens` that have none yet.

    `tokens` is int32 [sequence length]; `keys` are those of its first pages.
    """
    # NOTE: the same tokens with another dtype would get other keys, and the cache would never hit.
    assert tokens.dtype == np.int32
    parent = keys[-1] if keys else root
    for start in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        page_tokens = tokens[start : start + page_size].tobytes()
        parent = blake2b(page_tokens, digest_size=KEY_BYTES, key=parent).digest()
        keys.append(parent)


def prompt_keys(prompt_ids: bytes, *, page_size: int, namespace: str) -> bytes:
    """Returns the concatenated keys of a prompt's full pages, as AdmitRequest carries them.

    PERF: it takes about 1 us per page; for a long prompt the tokenizer calls it in a thread.
    """
    keys: list[bytes] = []
    extend_keys(keys, array_i32(prompt_ids), page_size=page_size, root=root_key(namespace))
    return b"".join(keys)


def split_keys(keys: bytes) -> list[bytes]:
    """Returns the keys of concatenated ones."""
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


class PageKeys(Sequence[bytes]):
    """The keys of a sequence's full pages. All children of a request share the keys of the prompt,
    as the bytes in which they arrived.
    """

    __slots__ = ("_num_prompt", "_own", "_prompt", "namespace")

    def __init__(self, prompt: bytes, *, namespace: str) -> None:
        self._prompt = prompt
        self._num_prompt = len(prompt) // KEY_BYTES
        self._own: list[bytes] = []
        self.namespace = namespace

    def __len__(self) -> int:
        return self._num_prompt + len(self._own)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            first = index.start - self._num_prompt
            if first >= 0:
                return self._own[first : index.stop - self._num_prompt]
            stop = min(index.stop, self._num_prompt)
            known = [
                self._prompt[place : place + KEY_BYTES]
                for place in range(index.start * KEY_BYTES, stop * KEY_BYTES, KEY_BYTES)
            ]
            return known + self._own[: max(index.stop - self._num_prompt, 0)]
        if index >= self._num_prompt:
            return self._own[index - self._num_prompt]
        return self._prompt[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def append(self, page_tokens: bytes) -> None:
        """Appends the key of the next page, whose tokens are `page_tokens`, int32."""
        if self._own:
            parent = self._own[-1]
        else:
            parent = self._prompt[-KEY_BYTES:] or root_key(self.namespace)
        self._own.append(blake2b(page_tokens, digest_size=KEY_BYTES, key=parent).digest())

    def num_common(self, other: PageKeys, *, start: int, stop: int) -> int:
        """Returns how many of the first `stop` keys both have. The first `start` must be equal."""
        low, high = start, min(stop, len(self), len(other))
        while low < high:
            middle = (low + high + 1) // 2
            if self[middle - 1] == other[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low
