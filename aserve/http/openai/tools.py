"""The tools of a request and the choice between them, checked and in one form for all endpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.body import wrong_field
from aserve.http.openai.json_values import decode_json
from aserve.http.openai.limits import check_length
from aserve.http.openai.schema import FunctionName, Tool, ToolChoiceObject
from aserve.parsers.events import ToolSpec

ToolDefinition: TypeAlias = dict[str, Any]
Mode: TypeAlias = Literal["none", "auto", "required"]

MAX_TOOLS = 512
NAME_PATTERN = "[a-zA-Z0-9_-]{1,128}"
NAME = re.compile(NAME_PATTERN)


class ToolChoice(NamedTuple):
    """Whether the output may, must or must not call a tool, and which ones; None allows all."""

    mode: Mode = "auto"
    names: Collection[str] | None = None
    is_one: bool = False  # exactly one call of the one name


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the output may call. `definitions` are in OpenAI's form, as the client sent
    them: the chat template shows them to the model. `specs` are those that may be called. Without
    `is_parallel` the output has at most one call.
    """

    definitions: tuple[ToolDefinition, ...] = ()
    specs: tuple[ToolSpec, ...] = ()
    mode: Mode = "none"
    is_parallel: bool = True


NO_TOOLS = ToolUse()


def read_tools(given: msgspec.Raw, *, param: str = "tools") -> list[ToolDefinition]:
    """Decodes and checks the tools of a body. It returns an empty list if there are none."""
    if bytes(given) == b"null":
        return []
    definitions = decode_json(bytes(given), list[dict[str, Any]], param=param)
    if not definitions:
        raise InvalidRequest(
            f"Invalid '{param}': the list is empty.", param=param, code="empty_array"
        )
    return definitions


def read_functions(given: msgspec.Raw) -> list[ToolDefinition]:
    """Converts `functions`, the older form of `tools`."""
    functions = read_tools(given, param="functions")
    return [{"type": "function", "function": function} for function in functions]


def choose_tools(
    definitions: Sequence[ToolDefinition],
    choice: ToolChoice,
    *,
    is_parallel: bool = True,
    param: str = "tools",
) -> ToolUse:
    """Checks the tools and the choice, and returns what the output may call."""
    if not definitions:
        if choice.mode == "required" or choice.names is not None:
            raise _wrong_choice("it is only allowed when 'tools' are given.")
        return NO_TOOLS
    specs = _specs_of(definitions, param)
    unknown = set(choice.names or ()) - {spec.name for spec in specs}
    if unknown:
        raise _wrong_choice(f"the tool '{min(unknown)[:80]}' is not in '{param}'.")
    if choice.mode == "none":
        return NO_TOOLS
    if choice.names is not None:
        specs = [spec for spec in specs if spec.name in choice.names]
    callable_names = {spec.name for spec in specs}
    shown = [tool for tool in definitions if tool["function"]["name"] in callable_names]
    return ToolUse(
        tuple(definitions if choice.is_one else shown),
        tuple(specs),
        choice.mode,
        is_parallel=is_parallel and not choice.is_one,
    )


def read_choice(given: str | ToolChoiceObject | None) -> ToolChoice:
    """Reads `tool_choice` of a chat."""
    match given:
        case None:
            return ToolChoice()
        case "auto" | "none" | "required":
            return ToolChoice(given)
        case ToolChoiceObject(type="function", function=FunctionName(name)):
            return ToolChoice("required", (name,), is_one=True)
        case ToolChoiceObject(type="allowed_tools", allowed_tools=allowed) if allowed is not None:
            return allowed_choice(allowed.mode, [tool.function.name for tool in allowed.tools])
        case _:
            shown = given if isinstance(given, str) else given.type
            raise _wrong_choice(
                f"got '{shown[:40]}'. Supported values are auto, none, required, a function, and "
                "allowed_tools.",
            )


def allowed_choice(mode: Literal["auto", "required"], names: Collection[str]) -> ToolChoice:
    if not names:
        raise _wrong_choice("the list of allowed tools is empty.")
    return ToolChoice(mode, names)


def read_function_choice(given: str | FunctionName | None) -> ToolChoice:
    """Reads `function_call`, the older form of `tool_choice`."""
    match given:
        case FunctionName(name):
            return ToolChoice("required", (name,), is_one=True)
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case _:
            raise InvalidRequest(
                f"Invalid 'function_call': got '{given[:40]}'. Supported values are auto, none and "
                "an object with a name.",
                param="function_call",
                code="invalid_value",
            )


def _specs_of(definitions: Sequence[ToolDefinition], param: str) -> list[ToolSpec]:
    check_length(definitions, MAX_TOOLS, param=param)
    try:
        tools = msgspec.convert(definitions, list[Tool])
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), param) from None
    specs: dict[str, ToolSpec] = {}
    for i, tool in enumerate(tools):
        spec = _spec_of(tool, f"{param}[{i}]")
        if spec.name in specs:
            raise InvalidRequest(
                f"Invalid '{param}[{i}].function.name': another tool has the name '{spec.name}'.",
                param=f"{param}[{i}].function.name",
                code="invalid_value",
            )
        specs[spec.name] = spec
    return list(specs.values())


def check_tool_type(kind: str, where: str) -> None:
    if kind != "function":
        raise InvalidRequest(
            f"Unsupported value for '{where}.type': '{kind[:40]}'. The only supported value "
            "is function.",
            param=f"{where}.type",
            code="unsupported_value",
        )


def _spec_of(tool: Tool, where: str) -> ToolSpec:
    check_tool_type(tool.type, where)
    function = tool.function
    if not NAME.fullmatch(function.name):
        raise InvalidRequest(
            f"Invalid '{where}.function.name': expected a string that matches {NAME_PATTERN}.",
            param=f"{where}.function.name",
            code="invalid_value",
        )
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object":
        raise InvalidRequest(
            f"Invalid schema for function '{function.name}': the arguments of a function are an "
            f"object, but the schema's type is {str(kind)[:40]!r}.",
            param=f"{where}.function.parameters",
            code="invalid_function_parameters",
        )
    return ToolSpec(function.name, function.parameters, strict=bool(function.strict))


def _wrong_choice(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid 'tool_choice': {reason}", param="tool_choice", code="invalid_value"
    )
