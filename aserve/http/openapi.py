"""Describes the API as an OpenAPI document, and serves it with a page that lists and tries it.

The document is made from the routes and from the records of their bodies and answers, so it says
what the server accepts and what it answers. Events of streams are described by their kind alone.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from aiohttp import web
from msgspec import inspect as types

from aserve.config import ServerOptions
from aserve.http.answer_schemas import schemas_of_answers
from aserve.http.auth import has_keys
from aserve.http.errors import ErrorBody, error_body
from aserve.http.page import file_response
from aserve.http.route import Route, get
from aserve.http.state import HttpContext

Json: TypeAlias = dict[str, Any]

SCHEMAS = "#/components/schemas/{name}"
# WHY: a record may be in bodies and in answers, and only in answers it has all its fields.
ANSWER_NAME = "answer.{name}"
PLACE = re.compile(r"{(\w+)(:[^{}]*)?}")  # of a path, with the pattern that it must match
# An example has the first of these contents that its body knows, and the first of each setting.
CONTENTS: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "Say hello."}],
    "prompt": "Once upon a time",
    "input": "Say hello.",
    "inputs": "Once upon a time",
    "text": "Once upon a time",
    "tokens": [1, 2, 3],
    "documents": ["The fox ran home.", "The dog slept."],
    "text_1": "The fox ran home.",
    "rid": "a request id",
}
SETTINGS: Sequence[Mapping[str, Any]] = (
    {"max_output_tokens": 32, "max_tokens": 32},
    {"temperature": 0.7},
    {"text_2": "The dog slept."},
)
NO_KEY: list[Json] = [{}]
CLIENT_KEY: list[Json] = [{"bearer": []}, {"header": []}]
SAMPLES: Mapping[type[types.Type], Any] = {
    types.IntType: 1,
    types.FloatType: 1.0,
    types.StrType: "x",
    types.BoolType: True,
    types.ListType: [],
    types.DictType: {},
}


class ApiDescription:
    """The document for the routes that a server has, made when it is first asked for."""

    def __init__(self, routes: Sequence[Route], options: ServerOptions, *, version: str) -> None:
        self._routes = routes
        self._version = version
        self._options = options

    @functools.cached_property
    def json(self) -> bytes:
        document = describe(self._routes, self._version, has_keys=has_keys(self._options))
        if self._options.root_path:
            document["servers"] = [{"url": self._options.root_path}]
        return msgspec.json.encode(document)


DESCRIPTION = web.AppKey("description", ApiDescription)


def describe(routes: Sequence[Route], version: str, *, has_keys: bool) -> Json:
    bodies = [route.body for route in routes if route.body is not None]
    records: list[type[msgspec.Struct]] = list(dict.fromkeys([*bodies, ErrorBody]))
    schemas, components = msgspec.json.schema_components(records, ref_template=SCHEMAS)
    schema_of = dict(zip(records, schemas, strict=True))
    answers, answer_components = schemas_of_answers(SCHEMAS.format(name=ANSWER_NAME))
    components |= {ANSWER_NAME.format(name=name): s for name, s in answer_components.items()}
    paths: dict[str, Json] = {}
    for route in routes:
        operation = _operation(route, schema_of)
        operation["responses"] = _responses(route, answers)
        if has_keys or route.admin:
            operation["security"] = NO_KEY if route.public else CLIENT_KEY
        paths.setdefault(_plain_path(route), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "aserve", "version": version, "summary": "An LLM inference server"},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": _errors(schema_of[ErrorBody]),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _operation(route: Route, schema_of: Mapping[type[msgspec.Struct], Json]) -> Json:
    handler = route.handler
    words = handler.__name__.replace("_", " ")
    operation: Json = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": words,
        "tags": [_tag(route)],
    }
    if handler.__doc__:
        operation["description"] = inspect.cleandoc(handler.__doc__)
    places = PLACE.findall(route.path)
    if places:
        operation["parameters"] = [_parameter(name, pattern) for name, pattern in places]
    if route.body is not None:
        media = {"schema": schema_of[route.body], "example": example_of(route.body)}
        operation["requestBody"] = {"required": True, "content": {"application/json": media}}
    return operation


def _plain_path(route: Route) -> str:
    return PLACE.sub(r"{\1}", route.path)


def _tag(route: Route) -> str:
    if route.admin:
        return "admin"
    return "openai" if route.path.startswith("/v1/") else "server"


def _parameter(name: str, pattern: str) -> Json:
    schema = {"type": "string", "pattern": f"^{pattern[1:]}$"} if pattern else {"type": "string"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _responses(route: Route, answers: Mapping[str, Json]) -> Json:
    success: Json = {"description": "The answer."}
    place = f"{route.method} {_plain_path(route)}"
    if place in answers:
        success["content"] = {"application/json": {"schema": answers[place]}}
        if route.body is not None and "stream" in route.body.__struct_fields__:
            success["content"]["text/event-stream"] = {}
    responses = {"200": success}
    if route.errors is error_body:
        responses |= {code: {"$ref": f"#/components/responses/{code}"} for code in ("4XX", "5XX")}
    else:
        responses |= {code: {"description": "An error."} for code in ("4XX", "5XX")}
    return responses


def _errors(schema: Json) -> Json:
    about = {
        "4XX": "The request cannot be served as it is; 429 may be tried again.",
        "5XX": "The server failed, or does not accept requests now.",
    }
    content = {"application/json": {"schema": schema}}
    return {code: {"description": text, "content": content} for code, text in about.items()}


def example_of(body: type[msgspec.Struct]) -> Json:
    """Returns a small body that the record accepts."""
    record = types.type_info(body)
    assert isinstance(record, types.StructType)
    example = _required(record)
    names = body.__struct_encode_fields__
    for spellings in (CONTENTS, *SETTINGS):
        example |= next(({name: spellings[name]} for name in spellings if name in names), {})
    return example


def _required(record: types.StructType) -> Json:
    given = {field.encode_name: _sample(field.type) for field in record.fields if field.required}
    return given | ({record.tag_field: record.tag} if record.tag_field else {})


def _sample(kind: types.Type) -> Any:
    """Returns the smallest value of a type."""
    if isinstance(kind, types.UnionType):
        kind = kind.types[0]
    if isinstance(kind, types.StructType):
        return _required(kind)
    if isinstance(kind, types.LiteralType):
        return kind.values[0]
    return SAMPLES.get(type(kind))


async def openapi(request: web.Request, _: HttpContext) -> web.Response:
    """Returns this document."""
    return web.Response(body=request.app[DESCRIPTION].json, content_type="application/json")


async def docs(_: web.Request, __: HttpContext) -> web.Response:
    """Returns a page that lists the endpoints and tries them."""
    return file_response("docs.html")


ROUTES = (
    get("/openapi.json", openapi, public=True),
    get("/docs", docs, public=True),
)
