"""Endpoints that describe the server and its model, under the names that SGLang and vLLM use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import msgspec
from aiohttp import web

from aserve.batches.lines import MAX_LINES
from aserve.grammar import source_limits as grammars
from aserve.http import json_bounds
from aserve.http.abort import MAX_ABORTED_IDS
from aserve.http.batches.handlers import MAX_FIELD, MAX_OPEN, MAX_PAGE
from aserve.http.decompress import MAX_RATIO
from aserve.http.delivery import json_response
from aserve.http.intake import MIN_BYTES_PER_S
from aserve.http.openai import json_values, limits
from aserve.http.openai.grammars import MAX_DEPTH as MAX_SCHEMA_DEPTH
from aserve.http.openai.tools import MAX_TOOLS
from aserve.http.probes import health
from aserve.http.responses import call, conversation, websocket
from aserve.http.route import get
from aserve.http.state import HttpContext
from aserve.text.prompt import PromptEncoder
from aserve.text.template import MAX_RENDERED_CHARS
from aserve.text.template_environment import MAX_RENDER_S

# The limits of requests have the names of the fields that they bound.
ITEMS = {
    "stop": limits.MAX_STOPS,
    "stop_token_ids": limits.MAX_STOP_TOKEN_IDS,
    "logit_bias": limits.MAX_LOGIT_BIAS,
    "allowed_token_ids": limits.MAX_ALLOWED_TOKEN_IDS,
    "bad_words": limits.MAX_BAD_WORDS,
    "tools": MAX_TOOLS,
    "metadata": call.MAX_METADATA,
    "conversation": conversation.MAX_ITEMS,
    "request_ids": MAX_ABORTED_IDS,
}
CHARACTERS = {
    "stop": limits.MAX_STOP_CHARS,
    "bad_words": limits.MAX_BAD_WORD_CHARS,
    "cache_salt": limits.MAX_SALT_CHARS,
    "rid": limits.MAX_RID_CHARS,
    "metadata_key": call.MAX_METADATA_KEY,
    "metadata_value": call.MAX_METADATA_VALUE,
    "prompt": MAX_RENDERED_CHARS,
}
DEPTH = {
    "body": json_bounds.MAX_DEPTH,
    "template_values": json_values.MAX_DEPTH,
    "json_schema": MAX_SCHEMA_DEPTH,
}


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
        num_pages = spec.total_pages
        sizes = {
            "page_size": spec.page_size,
            "num_pages": num_pages,
            "max_total_num_tokens": num_pages * spec.page_size,
            "max_running_requests": spec.max_rows,
            "max_queued_requests": spec.max_waiting,
            "max_batched_tokens": spec.max_batched_tokens,
            "dp_size": spec.dp_size,
        }
        if spec.hot_bytes_per_row:
            sizes["hisparse_bytes_per_request"] = spec.hot_bytes_per_row
    model = context.model_names[0]
    return json_response(
        {
            **context.settings,
            "version": version(),
            "weight_version": state.weight_version,
            "status": state.phase,
            "model_path": context.settings.get("model") or model,
            "served_model_name": model,
            "max_model_len": state.max_model_len,
            "context_length": state.max_model_len,
            "reasoning_parser": state.parsers.reasoning,
            "tool_call_parser": state.parsers.tools,
            **sizes,
            "settings": None if spec is None else state.settings.now,
            "limits": limits_of(context),
            "internal_states": [sizes],
        }
    )


def limits_of(context: HttpContext) -> dict[str, Mapping[str, object]]:
    """Returns the limits by kind. A number has its lowest and highest value."""
    options = context.options
    numbers = {name: [limit.low, limit.high] for name, limit in limits.RANGES.items()}
    return {
        "numbers": numbers | {"logit_bias": [-limits.MAX_BIAS, limits.MAX_BIAS]},
        "items": ITEMS,
        "characters": CHARACTERS,
        "depth": DEPTH,
        "body": {
            "bytes": options.max_body_size,
            "compression_ratio": MAX_RATIO,
            "fields": json_bounds.MAX_FIELDS,
            "arrays_and_objects": json_bounds.MAX_CONTAINERS,
            "members": json_bounds.MAX_MEMBERS,
            "values": json_bounds.MAX_VALUES + (context.state.max_model_len or 0),
            "escapes": json_bounds.MAX_ESCAPES,
            "exponents": json_bounds.MAX_EXPONENTS,
        },
        "files": {
            "file_bytes": options.max_file_size,
            "bytes": options.files_size,
            "field_bytes": MAX_FIELD,
            "lines": MAX_LINES,
            "open_batches": MAX_OPEN,
            "page": MAX_PAGE,
        },
        "grammars": {
            "characters": grammars.MAX_SOURCE,
            "nesting": grammars.MAX_DEPTH,
            "waiting": grammars.MAX_PENDING,
            "waiting_per_client": grammars.MAX_PER_CLIENT,
        },
        "requests": {
            "sequences": context.state.max_sequences,
            "connections": options.max_connections,
            "websocket_requests": websocket.MAX_OPEN,
            "unread_bytes": options.max_unread_bytes,
        },
        "seconds": {
            "header": options.header_timeout,
            "body": options.body_timeout,
            "body_per_byte": 1 / MIN_BYTES_PER_S,
            "keep_alive": options.keep_alive_timeout,
            "template": MAX_RENDER_S,
        },
    }


async def model_info(_: web.Request, context: HttpContext) -> web.Response:
    spec = context.state.spec
    name = context.model_names[0]
    source = context.settings.get("model") or name
    return json_response(
        {
            "model_path": source,
            "tokenizer_path": source,
            "served_model_name": name,
            "is_generation": context.state.task == "generate",
            "max_model_len": context.state.max_model_len,
            "vocab_size": None if spec is None else spec.vocab_size,
            "preferred_sampling_params": msgspec.to_builtins(context.state.defaults),
            "weight_version": context.state.weight_version,
            "has_image_understanding": context.tokenize_service.takes_pictures,
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
    get("/health_generate", health, public=True),
    get("/version", read_version),
    get("/server_info", server_info),
    get("/get_server_info", server_info),
    get("/model_info", model_info),
    get("/get_model_info", model_info),
    get("/tokenizer_info", tokenizer_info),
)
