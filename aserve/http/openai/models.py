"""GET /v1/models and /v1/models/{name}: returns the served model under each of its names."""

from __future__ import annotations

import msgspec
from aiohttp import web

from aserve.http.openai.checks import check_model
from aserve.http.state import HttpContext


class ModelBody(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "aserve"
    parent: None = None


class ModelList(msgspec.Struct):
    data: list[ModelBody]
    object: str = "list"


async def list_models(_: web.Request, context: HttpContext) -> web.Response:
    models = [_model(context, name) for name in context.model_names]
    return _response(ModelList(models))


async def read_model(request: web.Request, context: HttpContext) -> web.Response:
    name = request.match_info["name"]
    check_model(name, context.model_names)
    return _response(_model(context, name))


def _model(context: HttpContext, name: str) -> ModelBody:
    root = context.model_names[0]
    return ModelBody(name, context.created, root, context.state.max_model_len)


def _response(body: ModelBody | ModelList) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
