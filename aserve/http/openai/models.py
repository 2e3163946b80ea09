"""GET /v1/models and /v1/models/{name}: returns the served model under each of its names."""

from __future__ import annotations

import msgspec

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


def model_list(context: HttpContext) -> bytes:
    return msgspec.json.encode(ModelList([model_of(context, name) for name in context.model_names]))


def one_model(context: HttpContext, name: str) -> bytes:
    check_model(name, context.model_names)
    return msgspec.json.encode(model_of(context, name))


def model_of(context: HttpContext, name: str) -> ModelBody:
    root = context.model_names[0]
    return ModelBody(name, context.created, root, context.state.max_model_len)
