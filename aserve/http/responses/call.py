"""Converts the body of POST /v1/responses to a call and the initial response object.

A ResponseCall is built once from a validated body and never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.answer_size import check_answer_size
from aserve.http.openai.call import Call, Origin, build_call, sampling_of
from aserve.http.openai.checks import check_body
from aserve.http.openai.conversation import template_variables
from aserve.http.openai.grammars import format_grammar
from aserve.http.openai.limits import check_length
from aserve.http.responses.body import LOGPROBS, ResponseBody, TextConfig, TextFormat
from aserve.http.responses.conversation import MAX_ITEMS, Message, messages_of, prompt_of
from aserve.http.responses.records import ResponseObject
from aserve.http.responses.store import ResponseKey
from aserve.messages.requests import SamplingParams

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

# Unsupported fields that would change the answer, with the advice in their error.
UNSUPPORTED = {
    "background": "A response ends with its connection.",
    "conversation": "Use 'previous_response_id' instead.",
    "tools": "This server does not support tools in responses.",
    "max_tokens": "Use 'max_output_tokens' instead.",
    "response_format": "Use 'text.format' instead.",
    "n": "A response has one output.",
    "return_token_ids": "Use /v1/completions instead.",
}


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A call with the response that it begins. `messages` is the whole conversation, earlier turns
    first, without instructions.
    """

    call: Call
    response: ResponseObject
    messages: tuple[Message, ...]
    owner: str


def response_call(
    body: ResponseBody, origin: Origin, conversation: Callable[[ResponseKey], Sequence[Message]]
) -> ResponseCall:
    """Builds the call. `conversation` returns the messages of an earlier response, or raises."""
    _check(body, origin)
    sampling = _sampling_of(body, origin)
    previous_id = body.previous_response_id
    earlier: Sequence[Message] = ()
    if previous_id is not None:
        earlier = conversation(ResponseKey(origin.caller.owner, previous_id))
    response_id = f"resp_{origin.request_id}"
    if isinstance(body.input, list):
        check_length(range(len(earlier) + len(body.input)), MAX_ITEMS, param="input")
    messages = (*earlier, *messages_of(body.input, response_id))
    prompt = msgspec.structs.replace(
        prompt_of(body.instructions, messages),
        variables=template_variables(body.chat_template_kwargs),
    )
    call = build_call(body, origin, prompts=[prompt], sampling=sampling, id_prefix="resp_")
    check_answer_size(call.requests, origin.answer_limits, is_whole=True)  # the last event has all
    response = ResponseObject(
        id=call.call_id,
        created_at=call.created,
        model=call.model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        previous_response_id=previous_id,
        store=body.store is not False,
        temperature=sampling.temperature,
        top_p=sampling.top_p if body.top_p is None else body.top_p,
        top_logprobs=body.top_logprobs or 0,
        text=TextConfig(_format_of(body)),
        tool_choice=body.tool_choice or "auto",
        metadata=body.metadata or {},
        user=body.user,
        seed=sampling.seed,
    )
    return ResponseCall(call, response, messages, origin.caller.owner)


def _check(body: ResponseBody, origin: Origin) -> None:
    for name, advice in UNSUPPORTED.items():
        if getattr(body, name):
            raise InvalidRequest(
                f"Unsupported parameter: '{name}'. {advice}",
                param=name,
                code="unsupported_parameter",
            )
    check_body(body, origin.model_names)
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    check_length(metadata, MAX_METADATA, param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"Invalid 'metadata': a key has at most {MAX_METADATA_KEY} characters, "
                f"its value {MAX_METADATA_VALUE}; got {len(key)} and {len(value)}.",
                param="metadata",
                code="string_above_max_length",
            )


def _sampling_of(body: ResponseBody, origin: Origin) -> SamplingParams:
    sampling = sampling_of(
        body,
        max_tokens=body.max_output_tokens,
        logprobs=_num_logprobs(body),
        draw_seed=origin.draw_seed,
        defaults=origin.defaults,
    )
    text_format = _format_of(body)
    grammar = format_grammar(text_format.type, text_format.schema, param="text.format")
    if grammar is None:
        return sampling
    if sampling.grammar is not None:
        raise InvalidRequest(
            "Invalid 'structured_outputs': 'text.format' already constrains the output. "
            "Send only one of them.",
            param="structured_outputs",
            code="invalid_value",
        )
    return msgspec.structs.replace(sampling, grammar=grammar)


def _num_logprobs(body: ResponseBody) -> int | None:
    """Returns the number of top logprobs, which `include` or `top_logprobs` asks for."""
    if LOGPROBS in (body.include or ()):
        return body.top_logprobs or 0
    return body.top_logprobs or None


def _format_of(body: ResponseBody) -> TextFormat:
    text_format = (body.text and body.text.format) or TextFormat("text")
    if text_format.type == "json_schema" and text_format.name is None:
        raise InvalidRequest(
            "Missing required parameter: 'text.format.name'.",
            param="text.format.name",
            code="missing_required_parameter",
        )
    return text_format
