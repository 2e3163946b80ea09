"""GET /v1/models and /v1/models/{name}: returns the served model and its LoRA adapters."""

from __future__ import annotations

import msgspec
from aiohttp import web

from aserve.http.delivery import json_response
from aserve.http.openai.checks import check_model
from aserve.http.route import get
from aserve.http.state import HttpContext


class ModelBody(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int | None
    object: str = "model"
    owned_by: str = "aserve"
    parent: str | None = None


class ModelList(msgspec.Struct):
    data: list[ModelBody]
    object: str = "list"


async def list_models(_: web.Request, context: HttpContext) -> web.Response:
    models = [_model(context, name) for name in context.served_names]
    return json_response(ModelList(models))


async def read_model(request: web.Request, context: HttpContext) -> web.Response:
    name = request.match_info["name"]
    check_model(name, context.served_names)
    return json_response(_model(context, name))


def _model(context: HttpContext, name: str) -> ModelBody:
    """A LoRA adapter's root is its path and its parent is the base model, as in vLLM."""
    root, lora = context.model_names[0], context.loras.find(name)
    if lora is not None:
        max_len = context.state.max_model_len
        return ModelBody(name, lora.created, lora.path, max_len, parent=root)
    return ModelBody(name, context.created, root, context.state.max_model_len)


ROUTES = (
    get("/v1/models", list_models),
    get("/v1/models/{name:.+}", read_model),  # a name may have slashes
)
