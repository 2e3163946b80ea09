"""Converts the body of POST /v1/responses to a call and the initial response object.

A ResponseCall is built once from a validated body and never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.answer_size import check_answer_size
from aserve.http.openai.call import Call, Origin, build_call, sampling_of
from aserve.http.openai.chat_plan import ChatPlan, plan_chat
from aserve.http.openai.checks import check_body, unsupported
from aserve.http.openai.grammars import format_grammar
from aserve.http.openai.limits import check_length
from aserve.http.openai.parsed import ParsePlan
from aserve.http.responses.body import (
    LOGPROBS,
    ConversationRef,
    ReasoningConfig,
    ResponseBody,
    TextConfig,
    TextFormat,
)
from aserve.http.responses.conversation import MAX_ITEMS, Item, chat_messages, items_of
from aserve.http.responses.records import ResponseObject
from aserve.http.responses.store import ResponseKey
from aserve.http.responses.tools import bans_calls, chat_of
from aserve.messages.requests import ChatPrompt, Grammar, SamplingParams

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

# Unsupported fields that would change the answer, with the advice in their error.
UNSUPPORTED = {
    "max_tokens": "Use 'max_output_tokens' instead.",
    "response_format": "Use 'text.format' instead.",
    "n": "A response has one output.",
    "return_token_ids": "Use /v1/completions instead.",
    "return_tokens_as_token_ids": "Use /v1/completions instead.",
}


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A call with the response that it begins. `items` is the whole conversation, earlier turns
    first, without instructions.
    """

    call: Call
    response: ResponseObject
    items: tuple[Item, ...]
    num_earlier: int  # the items of the response or conversation that it continues
    owner: str
    parse: ParsePlan


class History(Protocol):
    """Finds the items that a response continues, or raises."""

    def response_items(self, key: ResponseKey) -> Sequence[Item]:
        """Returns the items up to the end of an earlier response."""

    def conversation_items(self, key: ResponseKey) -> Sequence[Item]: ...


def response_call(body: ResponseBody, origin: Origin, history: History) -> ResponseCall:
    _check(body, origin)
    sampling = _sampling_of(body, origin)
    earlier = _earlier_items(body, origin, history)
    items = (*earlier, *_new_items(body, origin, len(earlier)))
    plan = _plan_of(body, origin, items, sampling.grammar)
    sampling = plan.constrained(sampling)
    if body.truncation == "auto" and body.truncate_prompt_tokens is None:
        body = msgspec.structs.replace(body, truncate_prompt_tokens=-1)
    call = build_call(body, origin, prompts=[plan.prompt], sampling=sampling, id_prefix="resp_")
    check_answer_size(call.requests, origin.answer_limits, is_whole=True)  # the last event has all
    response = ResponseObject(
        id=call.call_id,
        created_at=call.created,
        model=call.model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        previous_response_id=body.previous_response_id,
        conversation=_conversation_of(body),
        store=body.store is not False,
        temperature=sampling.temperature,
        top_p=sampling.top_p if body.top_p is None else body.top_p,
        top_logprobs=body.top_logprobs or 0,
        text=TextConfig(_format_of(body)),
        tool_choice=body.tool_choice or "auto",
        tools=tuple(body.tools or ()),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        truncation=body.truncation or "disabled",
        background=bool(body.background),
        reasoning=body.reasoning or ReasoningConfig(),
        metadata=body.metadata or {},
        user=body.user,
        seed=sampling.seed,
        status="queued" if body.background else "in_progress",
    )
    return ResponseCall(call, response, items, len(earlier), origin.caller.owner, plan.parse)


def prompt_of(body: ResponseBody, origin: Origin, history: History) -> ChatPrompt:
    """Returns the prompt of a response that is not created."""
    _check(body, origin)
    earlier = _earlier_items(body, origin, history)
    items = (*earlier, *_new_items(body, origin, len(earlier)))
    return _plan_of(body, origin, items, None).prompt


def _earlier_items(body: ResponseBody, origin: Origin, history: History) -> Sequence[Item]:
    """Returns the items of the response or conversation that the body continues."""
    continued, previous_id = _conversation_of(body), body.previous_response_id
    if continued is not None and previous_id is not None:
        raise InvalidRequest(
            "Invalid 'conversation': it cannot be combined with 'previous_response_id'.",
            param="conversation",
            code="mutually_exclusive_parameters",
        )
    if continued is not None:
        return history.conversation_items(ResponseKey(origin.caller.owner, continued.id))
    if previous_id is not None:
        return history.response_items(ResponseKey(origin.caller.owner, previous_id))
    return ()


def _new_items(body: ResponseBody, origin: Origin, num_earlier: int) -> tuple[Item, ...]:
    if isinstance(body.input, list):
        check_length(range(num_earlier + len(body.input)), MAX_ITEMS, param="input")
    return items_of(body.input, f"resp_{origin.request_id}")


def _conversation_of(body: ResponseBody) -> ConversationRef | None:
    given = body.conversation
    return ConversationRef(given) if isinstance(given, str) else given


def _plan_of(
    body: ResponseBody, origin: Origin, items: Sequence[Item], grammar: Grammar | None
) -> ChatPlan:
    chat = chat_of(body, chat_messages(body.instructions, items))
    return plan_chat(chat, origin.parsers, grammar=grammar, bans_calls=bans_calls(body))


def _check(body: ResponseBody, origin: Origin) -> None:
    for name, advice in UNSUPPORTED.items():
        if getattr(body, name):
            raise unsupported(name, advice)
    if body.background and body.store is False:
        raise unsupported("background", "It needs 'store'.")
    check_body(body, origin.model_names)
    check_metadata(body.metadata or {})


def check_metadata(metadata: dict[str, str]) -> None:
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
