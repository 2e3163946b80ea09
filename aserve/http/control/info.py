"""Endpoints that describe the server and its model, under the names that SGLang and vLLM use."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import msgspec
from aiohttp import web

from aserve.http.delivery import json_response
from aserve.http.openai.limits import RANGES
from aserve.http.probes import health
from aserve.http.route import get
from aserve.http.state import HttpContext
from aserve.text.prompt import PromptEncoder


def version() -> str:
    try:
        return metadata.version("aserve")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return "0"


async def read_version(_: web.Request, __: HttpContext) -> web.Response:
    return json_response({"version": version()})


async def server_info(_: web.Request, context: HttpContext) -> web.Response:
    """Returns the options without keys, the sizes that were chosen, and the limits of requests."""
    state, spec = context.state, context.state.spec
    sizes: dict[str, object] = {}
    if spec is not None:
        num_pages = spec.groups[0].num_pages - 1
        sizes = {
            "page_size": spec.page_size,
            "num_pages": num_pages,
            "max_total_num_tokens": num_pages * spec.page_size,
            "max_running_requests": spec.max_rows,
            "max_queued_requests": spec.max_waiting,
            "max_batched_tokens": spec.max_batched_tokens,
        }
    model = context.model_names[0]
    return json_response(
        {
            **context.settings,
            "version": version(),
            "status": state.phase,
            "model_path": context.settings.get("model") or model,
            "served_model_name": model,
            "max_model_len": state.max_model_len,
            "context_length": state.max_model_len,
            "reasoning_parser": state.parsers.reasoning,
            "tool_call_parser": state.parsers.tools,
            **sizes,
            "settings": None if spec is None else state.settings.now,
            "limits": {name: [limit.low, limit.high] for name, limit in RANGES.items()},
            "internal_states": [sizes],
        }
    )


async def model_info(_: web.Request, context: HttpContext) -> web.Response:
    spec = context.state.spec
    name = context.model_names[0]
    source = context.settings.get("model") or name
    return json_response(
        {
            "model_path": source,
            "tokenizer_path": source,
            "served_model_name": name,
            "is_generation": True,
            "max_model_len": context.state.max_model_len,
            "vocab_size": None if spec is None else spec.vocab_size,
            "preferred_sampling_params": msgspec.to_builtins(context.state.defaults),
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


async def tokenizer_info(_: web.Request, context: HttpContext) -> web.Response:
    """Describes the tokenizer. The chat template is not shown: /render shows what it makes."""
    return json_response(await context.tokenize_service.run(tokenizer_fields))


def tokenizer_fields(encoder: PromptEncoder) -> dict[str, Any]:
    tokenizer = encoder.tokenizer
    bos_id = tokenizer.bos_id
    eos_tokens = [*map(tokenizer.token, tokenizer.eos_ids)]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": encoder.limits.max_model_len,
        "bos_token": None if bos_id is None else tokenizer.token(bos_id),
        "bos_token_id": bos_id,
        "eos_token": eos_tokens[0] if eos_tokens else None,
        "eos_token_ids": list(tokenizer.eos_ids),
        "special_tokens": sorted(tokenizer.special_texts),
        "add_bos_token": bos_id is not None,
    }


ROUTES = (
    get("/ping", health, public=True),
    get("/version", read_version),
    get("/server_info", server_info),
    get("/get_server_info", server_info),
    get("/model_info", model_info),
    get("/get_model_info", model_info),
    get("/tokenizer_info", tokenizer_info),
)
