"""Any JSON body to any route gets an answer below 500, and leaves nothing behind in the engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from inspect import unwrap
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from aserve.http.route import Route
from aserve.http.routes import ROUTES
from tests.fakes.executor import FakeExecutor
from tests.http.body_fields import path_of, right_body
from tests.http.whole_server import whole_server

NUM_BODIES = 3_000 if os.environ.get("ASERVE_TEST_PROFILE") == "large" else 30
BATCH = 10  # bodies that one server gets; those of the first batch are the simplest ones
# One route for each handler: its other paths are other names.
POSTS = {
    (unwrap(route.handler), route.body): route
    for route in reversed(ROUTES)
    if route.body is not None
}.values()

TEXT = st.text(max_size=8)
SMALL = st.integers(-2, 40)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
PLAIN: Mapping[type[inspect.Type], st.SearchStrategy[Any]] = {
    inspect.NoneType: st.none(),
    inspect.BoolType: st.booleans(),
    inspect.IntType: SMALL,
    inspect.FloatType: st.floats(0, 2) | SMALL,
    inspect.StrType: TEXT,
}


def values(kind: inspect.Type, depth: int = 3) -> st.SearchStrategy[Any]:
    """Values of a type, most of them small; any JSON below `depth` records."""
    match kind:
        case inspect.UnionType():
            return st.one_of([values(each, depth) for each in kind.types])
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.ListType():
            return st.lists(values(kind.item_type, depth), max_size=3)
        case inspect.DictType():
            return st.dictionaries(TEXT, values(kind.value_type, depth), max_size=3)
        case inspect.StructType() if depth:
            return records(kind, depth - 1)
        case _:
            return PLAIN.get(type(kind), ANY)


def records(kind: inspect.StructType, depth: int) -> st.SearchStrategy[Any]:
    """Records with some of the fields, each right or, now and then, anything."""
    tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
    fields = {field.encode_name: values(field.type, depth) for field in kind.fields}
    required = {field.encode_name for field in kind.fields if field.required}
    right = st.fixed_dictionaries(
        {name: each for name, each in fields.items() if name in required},
        optional={name: each for name, each in fields.items() if name not in required},
    )
    few = st.lists(st.sampled_from(sorted(fields)), max_size=4)
    some = st.tuples(right, few).map(
        lambda drawn: {k: v for k, v in drawn[0].items() if k in required or k in drawn[1]}
    )
    odd = st.dictionaries(st.sampled_from(sorted(fields)), ANY, max_size=1)
    return st.tuples(some, odd).map(lambda parts: tag | parts[0] | parts[1])


def bodies(route: Route) -> st.SearchStrategy[Any]:
    assert route.body is not None
    record = inspect.type_info(route.body)
    assert isinstance(record, inspect.StructType)
    known = {name: value for name, value in right_body(path_of(route)).items() if name != "stream"}
    complete = records(record, 3).map(lambda body: known | {"max_tokens": 4} | body)
    return complete | records(record, 3) | ANY


@pytest.mark.parametrize("route", POSTS, ids=lambda route: route.path)
def test_any_body_is_answered_and_leaves_the_pools_full(route: Route) -> None:
    # The assertion shows the one body that fails, so there is nothing to shrink.
    @settings(
        max_examples=1 + NUM_BODIES // BATCH,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(bodies(route), min_size=BATCH, max_size=BATCH))
    def every_batch(batch: list[Any]) -> None:
        asyncio.run(ask_all(path_of(route), batch))

    every_batch()


async def ask_all(path: str, batch: list[Any]) -> None:
    async with (
        asyncio.timeout(120),
        whole_server(FakeExecutor(), debug_checks=True, admin_api_key="root") as server,
    ):
        for body in batch:
            data = msgspec.json.encode(body)
            headers = {"Content-Type": "application/json", "Authorization": "Bearer root"}
            async with server.client.post(path, data=data, headers=headers) as answer:
                text = await answer.read()
                assert answer.status < 500, (data, text[:300])
        await server.until_idle()
