"""The scan counts what the decoder would make, in any slicing, and refuses before it is made."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.errors import InvalidRequest
from aserve.http import json_bounds
from aserve.http.json_bounds import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_ESCAPES,
    MAX_EXPONENTS,
    MAX_FIELDS,
    MAX_MEMBERS,
    MAX_VALUES,
    SLICE_BYTES,
    check_json_bounds,
)

NOISE = '[]{},:"\\e'  # in strings, where nothing counts
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet=st.sampled_from(NOISE + "a\n🚀")),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=40,
)


def counts(value: object) -> tuple[int, int, int]:
    """Arrays and objects, members of objects, and all that the scan calls values."""
    if isinstance(value, dict):
        inner, members = list(value.values()), len(value)
    elif isinstance(value, list):
        inner, members = value, 0
    else:
        return 0, 0, 0
    own = (1, members, 1 + max(0, len(inner) - 1))
    below = [counts(each) for each in inner]
    containers, all_members, values = (sum(column) for column in zip(own, *below, strict=True))
    return containers, all_members, values


def depth(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0)


@settings(max_examples=30)
@given(value=JSON, slice_bytes=st.integers(1, 40), is_ascii=st.booleans())
def test_the_scan_counts_as_the_decoder_does_in_slices_of_any_size(
    value: object, slice_bytes: int, is_ascii: bool
) -> None:
    data = json.dumps({"a": value}, ensure_ascii=is_ascii).encode()
    scan = json_bounds._Scan(1 << 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "SLICE_BYTES", slice_bytes)
        start = 0
        while start < len(data):
            end = json_bounds._slice_end(data, start)
            scan.add(data[start:end])
            start = end
    assert (scan._num_containers, scan._num_members, scan._num_values) == counts({"a": value})
    assert scan._depth == 0
    assert scan._num_fields == 1
    assert scan._num_exponents == 0


@settings(max_examples=30)
@given(value=JSON, limit=st.integers(1, 12))
def test_the_bound_of_depth_is_exact(value: object, limit: int) -> None:
    data = json.dumps({"a": value, "b": [0] * 200}).encode()  # enough marks to be scanned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "MAX_DEPTH", limit)
        is_deep = max(2, depth({"a": value})) > limit
        assert (refusal(data) is not None) == is_deep


def refusal(data: bytes) -> str | None:
    try:
        check_json_bounds(data)
    except InvalidRequest as error:
        return f"{error.error_code}: {error.message}"
    return None


def list_of(item: str, count: int) -> bytes:
    return ('{"a":[' + ",".join([item] * count) + "]}").encode()


@pytest.mark.parametrize(
    ("bound", "what", "make"),
    [
        (MAX_CONTAINERS, "arrays and objects", lambda n: list_of("[]", n - 2)),
        (MAX_CONTAINERS, "arrays and objects", lambda n: list_of("{}", n - 2)),
        (MAX_MEMBERS, "members", lambda n: b'{"":{"":1' + b',"a":1' * (n - 2) + b"}}"),
        (MAX_VALUES, "values", lambda n: list_of("1", n - 1)),
        (MAX_ESCAPES, "escapes", lambda n: b'{"a":"' + b"\\n" * n + b'"}'),
        (MAX_ESCAPES, "escapes", lambda n: b'{"a":"' + b"\\\\" * n + b'"}'),
        (MAX_ESCAPES, "escapes", lambda n: b'{"a":"' + b'\\"' * n + b'"}'),
        (MAX_EXPONENTS, "exponents", lambda n: list_of("1e9", n)),
        (MAX_EXPONENTS, "exponents", lambda n: list_of("true,false,1E9", n)),
        (MAX_FIELDS, "fields", lambda n: b'{"":[1,2]' + b',"a":"b"' * (n - 1) + b"}"),
        (MAX_DEPTH, "levels", lambda n: b"[" * n + b"]" * n),
        (MAX_DEPTH, "levels", lambda n: b'{"a":' * n + b"1" + b"}" * n),
    ],
)
def test_each_bound_is_allowed_and_one_more_is_named(
    bound: int, what: str, make: Callable[[int], bytes]
) -> None:
    assert refusal(make(bound)) is None
    message = refusal(make(bound + 1))
    assert message is not None
    assert message.startswith("body_too_complex: ")
    assert str(bound) in message
    assert what in message


def test_the_content_of_strings_does_not_count() -> None:
    text = json.dumps((NOISE + "1e5" + '\\"' * 3) * (SLICE_BYTES // 2))
    assert refusal(f'{{"prompt": {text}, "n": [1, 2]}}'.encode()) is None


def test_a_run_of_backslashes_over_many_slices_is_one_slice() -> None:
    for odd in (0, 1):
        data = (
            b'{"b":"' + b"\\" * (2 * SLICE_BYTES + odd) + b'", "a":' + list_of("[]", MAX_CONTAINERS)
        )
        is_open = bool(odd)  # the quote is escaped, so the string goes on
        assert (refusal(data) is None) == is_open
