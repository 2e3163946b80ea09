"""GET /v1/models: what this server serves, under every name that clients may use.

Must not know the engine.
"""

from __future__ import annotations

import msgspec

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
    root = context.model_names[0]
    max_model_len = context.state.max_model_len
    return msgspec.json.encode(
        ModelList(
            [ModelBody(name, context.created, root, max_model_len) for name in context.model_names]
        )
    )
