"""The tools, tool choice and reasoning of a body of /v1/responses, in the form of all endpoints."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from aserve.errors import InvalidRequest
from aserve.http.openai.checks import unsupported
from aserve.http.openai.conversation import Chat, ReasoningOptions
from aserve.http.openai.limits import check_length
from aserve.http.openai.reasoning import reasoning_budget, reasoning_limit
from aserve.http.openai.schema import ChatMessage
from aserve.http.openai.tools import (
    MAX_TOOLS,
    ToolChoice,
    ToolUse,
    allowed_choice,
    check_tool_type,
    choose_tools,
    read_choice,
)
from aserve.http.responses.body import (
    ReasoningConfig,
    ResponseBody,
    ResponseTool,
    ResponseToolChoice,
)


def chat_of(body: ResponseBody, messages: list[ChatMessage]) -> Chat:
    config = body.reasoning or ReasoningConfig()
    budget = reasoning_budget(
        {
            "thinking_token_budget": body.thinking_token_budget,
            "reasoning.max_tokens": None if config.max_tokens is UNSET else config.max_tokens,
        }
    )
    return Chat(
        messages=messages,
        tool_use=_tools_of(body),
        variables=body.chat_template_kwargs,
        reasoning=ReasoningOptions(
            is_enabled=False if budget == 0 else None,
            effort=config.effort,
            max_tokens=reasoning_limit(budget, effort=config.effort),
        ),
    )


def bans_calls(body: ResponseBody) -> bool:
    return body.tool_choice == "none"


def _tools_of(body: ResponseBody) -> ToolUse:
    check_length(body.tools or (), MAX_TOOLS, param="tools")
    definitions = [_definition(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    is_parallel = body.parallel_tool_calls is not False
    return choose_tools(definitions, _choice_of(body.tool_choice), is_parallel=is_parallel)


def _choice_of(given: str | ResponseToolChoice | None) -> ToolChoice:
    match given:
        case ResponseToolChoice(type="function", name=str(name)):
            return ToolChoice("required", (name,), is_one=True)
        case ResponseToolChoice(type="allowed_tools", mode=mode, tools=tools) if tools is not None:
            return allowed_choice(mode or "auto", [tool.name for tool in tools])
        case ResponseToolChoice():
            raise unsupported("tool_choice", f"The type '{given.type[:40]}' is not known.")
        case _:
            return read_choice(given)


def _definition(tool: ResponseTool, where: str) -> dict[str, Any]:
    """Converts a tool to the form of a chat, which templates expect."""
    check_tool_type(tool.type, where)
    if tool.name is None:
        raise InvalidRequest(
            f"Missing required parameter: '{where}.name'.",
            param=f"{where}.name",
            code="missing_required_parameter",
        )
    fields = msgspec.structs.asdict(tool)
    function = {name: value for name, value in fields.items() if value is not None}
    return {"type": function.pop("type"), "function": function}
