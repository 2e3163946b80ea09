"""The description of the API is whole and true: every route, every reference, working examples."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from aserve.http.answer_schemas import ANSWERS, described
from aserve.http.batches import handlers as batches
from aserve.http.errors import error_body
from aserve.http.forwarding import forwarded
from aserve.http.openapi import PLACE, describe, example_of
from aserve.http.page import FILES
from aserve.http.peers import Peers
from aserve.http.route import Route
from aserve.http.routes import ROUTES
from aserve.http.state import HttpContext
from tests.fakes.echo_engine import EchoEngine
from tests.fakes.executor import FakeExecutor
from tests.http.asking import ask
from tests.http.whole_server import whole_server

BODIES = [route for route in ROUTES if route.body is not None]


def document() -> Any:
    return msgspec.to_builtins(describe(ROUTES, "1", has_keys=True))


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for inner in part.values():
            yield from references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from references(inner)


def target(root: Any, reference: str) -> Any:
    for name in reference.removeprefix("#/").split("/"):
        root = root[name]
    return root


def test_every_route_is_described_once_with_its_body_its_errors_and_its_key() -> None:
    api = document()
    described = {
        (method.upper(), path): operation
        for path, methods in api["paths"].items()
        for method, operation in methods.items()
    }
    served = {(route.method, PLACE.sub(r"{\1}", route.path)): route for route in ROUTES}
    assert described.keys() == served.keys()
    names = [operation["operationId"] for operation in described.values()]
    assert len(names) == len(set(names))
    for place, operation in described.items():
        route = served[place]
        assert ("requestBody" in operation) is (route.body is not None)
        assert (operation["security"] == [{}]) is route.public
        assert {each["name"] for each in operation.get("parameters", [])} == set(
            re.findall(r"{(\w+)}", place[1])
        )
        assert operation["responses"]["200"]["description"]
        has_openai_errors = "$ref" in operation["responses"]["4XX"]
        assert has_openai_errors is (route.errors is error_body)
        if route.body is not None:
            media = operation["requestBody"]["content"]["application/json"]
            properties = target(api, media["schema"]["$ref"])["properties"]
            assert tuple(properties) == route.body.__struct_encode_fields__


def test_several_frontends_describe_the_same() -> None:
    several = cast(HttpContext, SimpleNamespace(peers=Peers(0, "sockets", "secret")))
    routes = [forwarded(route, several) for route in ROUTES]
    assert msgspec.to_builtins(describe(routes, "1", has_keys=True)) == document()
    assert not any(map(operator.is_, routes, ROUTES))


def test_every_reference_leads_to_something() -> None:
    api = document()
    found = set(references(api))
    assert len(found) > 5
    assert all(target(api, reference) for reference in found)


@pytest.mark.parametrize("route", BODIES, ids=lambda route: route.path)
async def test_every_example_decodes_and_every_clients_one_is_answered(
    echo: EchoEngine, route: Route
) -> None:
    assert route.body is not None
    example = example_of(route.body)
    msgspec.convert(example, route.body)
    if not route.admin:
        answer = await ask(echo, route.path, example)
        names_another = "{id}" in route.path or route in batches.ROUTES
        if route.handler.__name__ == "classify":  # the echo has no labels
            assert answer.error["code"] == "model_does_not_classify"
            return
        assert answer.status == (404 if names_another else 200), answer.text
        record = ANSWERS.get(f"POST {route.path}")
        if record is not None and not names_another:
            msgspec.json.decode(answer.text, type=described(record))


RICH: dict[str, Any] = {"n": 2, "seed": 3, "max_tokens": 4}
RICH_ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**RICH, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
    "/v1/completions": {**RICH, "logprobs": 2, "prompt_logprobs": 1},
    "/v1/responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "/v1/embeddings": {"encoding_format": "base64"},
    "/tokenize": {"return_token_strs": True},
}


@pytest.mark.parametrize("path", RICH_ASKS)
async def test_an_answer_with_everything_fits_its_description(path: str) -> None:
    route = next(route for route in BODIES if route.path == path)
    assert route.body is not None
    async with whole_server(FakeExecutor()) as server:
        body = example_of(route.body) | RICH_ASKS[path]
        async with server.client.post(path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            data = await answer.read()
    msgspec.json.decode(data, type=described(ANSWERS[f"POST {path}"]))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/echo", "/health"])
async def test_what_is_read_fits_its_description(echo: EchoEngine, path: str) -> None:
    answer = await ask(echo, path)
    place = path.replace("models/echo", "models/{name}")
    msgspec.json.decode(answer.text, type=described(ANSWERS[f"GET {place}"]))


def test_every_described_answer_is_one_of_a_route() -> None:
    api = document()
    places = {f"{m.upper()} {path}" for path, methods in api["paths"].items() for m in methods}
    assert set(ANSWERS) <= places


async def test_the_document_is_served_without_a_key_and_made_once() -> None:
    async with EchoEngine(api_key="secret") as echo:
        first = await ask(echo, "/openapi.json")
        assert first.status == 200
        assert first.json["paths"]["/v1/models"]["get"]["security"] != [{}]
        assert (await ask(echo, "/openapi.json")).text == first.text
    async with EchoEngine() as echo:
        open_api = (await ask(echo, "/openapi.json")).json
        assert "security" not in open_api["paths"]["/v1/models"]["get"]
        assert not any(
            "admin" in each["tags"] for p in open_api["paths"].values() for each in p.values()
        )


async def test_the_document_names_the_path_under_which_a_proxy_serves() -> None:
    async with EchoEngine(root_path="/models/a") as echo:
        document = (await ask(echo, "/openapi.json")).json
        assert document["servers"] == [{"url": "/models/a"}]
    async with EchoEngine() as echo:
        assert "servers" not in (await ask(echo, "/openapi.json")).json


async def test_the_page_of_the_api_loads_nothing_from_elsewhere(echo: EchoEngine) -> None:
    answer = await ask(echo, "/docs")
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
    for name in ("docs.html", "docs.css", "docs.js"):
        text = FILES[name].decode()
        assert not re.search(r"https?://|//[a-z]+\.|style=|onclick=\"", text), name
    for used in re.findall(r'(?:href|src)="(ui/[^"]+)"', answer.text):
        assert (await ask(echo, f"/{used}")).status == 200
