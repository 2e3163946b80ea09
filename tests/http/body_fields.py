"""Every place in the bodies that the routes read, found by their types: also those of tomorrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect

from aserve.http.route import Route
from aserve.http.routes import ROUTES


def path_of(route: Route) -> str:
    """A path of the route."""
    return route.path.replace("{id}", "x")


BODIES = {
    path_of(route): route.body for route in ROUTES if route.body is not None and not route.admin
}
# One path for each record: routes with the same record read their bodies in the same way.
PATHS = {body: path for path, body in reversed(BODIES.items())}.values()

# Makes every body right but for what a test puts into it: other routes' fields fall away.
RIGHT: dict[str, Any] = {
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "input": "a",
    "tokens": [1],
    "stream": True,
}

# What single routes need beside it, because the name means something else to another route.
OWN: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/parse_function_call": {"text": "a"},
    "/separate_reasoning": {"text": "a"},
    "/generate_stream": {"inputs": "a"},
    "/": {"inputs": "a"},
    "/abort_request": {"rid": "a"},
    "/v1/messages": {"max_tokens": 5},
    "/rerank": {"query": "a", "documents": ["a"]},
    "/score": {"text_1": "a", "text_2": "a"},
    "/v1/requests/x": {"max_tokens": 5},
    "/v1/requests/x/fork": {"token": 0},
    "/v1/batches": {"input_file_id": "a", "endpoint": "a", "completion_window": "a"},
}


def right_body(path: str) -> dict[str, Any]:
    return RIGHT | OWN.get(path, {})


# One value of each kind that JSON has, by the types that take it.
SAMPLES: dict[str, Any] = {
    "null": None,
    "bool": True,
    "int": 7,
    "float": 1.5,
    "str": "x",
    "array": [],
    "object": {},
}
TAKES: dict[type[inspect.Type], set[str]] = {
    inspect.NoneType: {"null"},
    inspect.BoolType: {"bool"},
    inspect.IntType: {"int"},
    inspect.FloatType: {"int", "float"},
    inspect.StrType: {"str"},
    inspect.ListType: {"array"},
    inspect.TupleType: {"array"},
    inspect.DictType: {"object"},
    inspect.StructType: {"object"},
    inspect.LiteralType: set(),
    inspect.AnyType: set(SAMPLES),
    inspect.RawType: set(SAMPLES),  # read later, by hand: its tests are by hand as well
}
Wrap: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class Place:
    """`path` is what an error calls it; `wrap` puts a value there in an otherwise right body."""

    path: str
    kind: inspect.Type
    wrap: Wrap

    @property
    def taken(self) -> set[str]:
        return set().union(*(TAKES[type(each)] for each in alternatives(self.kind)))

    def wrong_values(self) -> list[Any]:
        return [value for name, value in SAMPLES.items() if name not in self.taken]


def places(body: type[msgspec.Struct]) -> list[Place]:
    return list(_below(inspect.type_info(body), "", lambda value: value, frozenset()))


def alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _below(kind: inspect.Type, path: str, wrap: Wrap, seen: frozenset[type]) -> Iterator[Place]:
    for each in alternatives(kind):
        if isinstance(each, inspect.StructType) and each.cls not in seen:
            yield from _fields(each, path, wrap, seen | {each.cls})
        elif isinstance(each, inspect.ListType):
            yield from _place(each.item_type, f"{path}[0]", lambda v: wrap([v]), seen)
        elif isinstance(each, inspect.DictType):
            key = str(right_value(each.key_type))
            yield from _place(each.value_type, f"{path}[...]", _within(wrap, {}, key), seen)


def _fields(
    struct: inspect.StructType, path: str, wrap: Wrap, seen: frozenset[type]
) -> Iterator[Place]:
    right = right_value(struct)
    for field in struct.fields:
        name = field.encode_name
        inner = f"{path}.{name}" if path else name
        yield from _place(field.type, inner, _within(wrap, right, name), seen)


def _place(kind: inspect.Type, path: str, wrap: Wrap, seen: frozenset[type]) -> Iterator[Place]:
    yield Place(path, kind, wrap)
    yield from _below(kind, path, wrap, seen)


def _within(wrap: Wrap, right: dict[str, Any], name: str) -> Wrap:
    return lambda value: wrap({**right, name: value})


def right_value(kind: inspect.Type) -> Any:
    """The smallest value that a type takes."""
    first = alternatives(kind)[0]
    if isinstance(first, inspect.StructType):
        required = {f.encode_name: right_value(f.type) for f in first.fields if f.required}
        return required | ({first.tag_field: first.tag} if first.tag_field else {})
    if isinstance(first, inspect.LiteralType):
        return first.values[0]
    return next(SAMPLES[name] for name in SAMPLES if name in TAKES[type(first)])
