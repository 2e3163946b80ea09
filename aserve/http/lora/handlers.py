"""The administrator's endpoints that load and unload LoRA adapters, in vLLM's and SGLang's form."""

from __future__ import annotations

import msgspec
from aiohttp import web

from aserve.http.delivery import json_response
from aserve.http.errors import refused
from aserve.http.lora.registry import LoraRegistry
from aserve.http.openai.checks import check_model
from aserve.http.route import post
from aserve.http.state import HttpContext


class LoadLoraBody(msgspec.Struct):
    """`load_inplace` and `base_model_name` are vLLM's, `pinned` is SGLang's. Every adapter stays on
    the device until it is unloaded, so each is pinned.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    base_model_name: str | None = None
    pinned: bool | None = None


class UnloadLoraBody(msgspec.Struct):
    """`lora_int_id` is vLLM's; the name says enough."""

    lora_name: str
    lora_int_id: int | None = None


class LoadedLoras(msgspec.Struct):
    """SGLang's answer."""

    loaded_adapters: dict[str, str]  # paths by name
    success: bool = True
    error_message: str = ""


async def load(_: web.Request, context: HttpContext, body: LoadLoraBody) -> web.Response:
    """Answers as vLLM does."""
    await _load(context, body)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(_: web.Request, context: HttpContext, body: UnloadLoraBody) -> web.Response:
    """Answers as vLLM does."""
    context.loras.unload(body.lora_name)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def load_listed(_: web.Request, context: HttpContext, body: LoadLoraBody) -> web.Response:
    """Answers as SGLang does."""
    await _load(context, body)
    return _listed(context.loras)


async def unload_listed(_: web.Request, context: HttpContext, body: UnloadLoraBody) -> web.Response:
    """Answers as SGLang does."""
    context.loras.unload(body.lora_name)
    return _listed(context.loras)


async def _load(context: HttpContext, body: LoadLoraBody) -> None:
    refusal = context.state.refusal()
    if refusal is not None:
        raise refusal
    if body.base_model_name is not None:
        check_model(body.base_model_name, context.model_names)
    if body.lora_name in context.model_names:
        raise refused(400, f"'{body.lora_name}' is the name of the base model.")
    await context.loras.load(body.lora_name, body.lora_path, replaces=bool(body.load_inplace))


def _listed(loras: LoraRegistry) -> web.Response:
    body = LoadedLoras({each.name: each.path for each in loras.served})
    return json_response(body)


ROUTES = (
    post("/v1/load_lora_adapter", LoadLoraBody, load, admin=True),
    post("/v1/unload_lora_adapter", UnloadLoraBody, unload, admin=True),
    post("/load_lora_adapter", LoadLoraBody, load_listed, admin=True),
    post("/unload_lora_adapter", UnloadLoraBody, unload_listed, admin=True),
)
