import numpy as np
import pytest

from aserve.cache.prefix_tree import extend_keys, root_key
from aserve.messages.base import ArrayI32


def keys_of(tokens: list[int], *, page_size: int, namespace: str = "") -> list[bytes]:
    keys: list[bytes] = []
    array: ArrayI32 = np.array(tokens, dtype=np.int32)
    extend_keys(keys, array, page_size=page_size, root=root_key(namespace))
    return keys


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("num_pages", [0, 1, 3])
def test_only_whole_pages_have_keys_at_every_page_edge(page_size: int, num_pages: int) -> None:
    tokens = list(range(page_size * (num_pages + 2)))
    edge = num_pages * page_size
    assert len(keys_of(tokens[: max(edge - 1, 0)], page_size=page_size)) == max(
        (edge - 1) // page_size, 0
    )
    assert len(keys_of(tokens[:edge], page_size=page_size)) == num_pages
    assert len(keys_of(tokens[: edge + 1], page_size=page_size)) == (edge + 1) // page_size


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_keys_do_not_depend_on_when_the_tokens_arrived(page_size: int) -> None:
    tokens: ArrayI32 = np.arange(50, dtype=np.int32)
    keys: list[bytes] = []
    for num_tokens in (0, 1, 15, 16, 17, 33, 50, 50):
        extend_keys(keys, tokens[:num_tokens], page_size=page_size, root=root_key("a"))
    assert keys == keys_of(list(range(50)), page_size=page_size, namespace="a")


def test_namespaces_share_no_key() -> None:
    first = keys_of([1, 2, 3, 4], page_size=2, namespace="salt")
    second = keys_of([1, 2, 3, 4], page_size=2, namespace="salt2")
    assert len({*first, *second}) == 4


def test_equal_pages_after_different_prefixes_have_different_keys() -> None:
    first = keys_of([1, 2, 7, 8, 5, 5], page_size=2)
    second = keys_of([1, 3, 7, 8, 5, 5], page_size=2)
    third = keys_of([1, 2, 7, 8, 5, 6], page_size=2)
    assert not {*first} & {*second}
    assert first[:2] == third[:2]
    assert first[2] != third[2]
