"""Renders a model's chat template to a prompt text, in a sandbox and with bounded size.

Templates come with checkpoints and are written for transformers, so the Jinja environment has the
functions, filters and whitespace rules of transformers. They are untrusted, so it has nothing else.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aserve.errors import ConfigError, InvalidRequest

MAX_RENDERED_CHARS = 1 << 25
# Variables that requests must not set: aserve sets them, or they are arguments of transformers'
# apply_chat_template.
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "conversation", "tokenize", "return_dict", "return_tensors"}
)
# Errors that a template's code raises for messages that it does not expect.
TEMPLATE_FAULTS = (
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class ChatTemplate:
    """A compiled chat template. `with_tools` is used instead of `source` for messages with tools,
    so it is the `source` that shows how the model writes calls. `where` names the file in errors.
    """

    __slots__ = ("_plain", "_special_tokens", "_with_tools", "source")

    def __init__(
        self,
        source: str,
        *,
        with_tools: str | None = None,
        where: str = "the model",
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        self.source = source if with_tools is None else with_tools
        self._plain = _compiled(source, where)
        self._with_tools = self._plain if with_tools is None else _compiled(with_tools, where)
        self._special_tokens = special_tokens or {}

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> str:
        """Renders the prompt. `add_generation_prompt` begins the assistant's turn. Raises
        InvalidRequest if the template fails or the prompt is too long.

        `variables` are additional template variables, none of them RESERVED.
        """
        template = self._plain if tools is None else self._with_tools
        own = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        seen = self._special_tokens | dict(variables or {}) | own
        pieces: list[str] = []
        room = max_chars
        try:
            for piece in template.generate(seen):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    break
        except (jinja2.TemplateError, *TEMPLATE_FAULTS) as error:
            raise InvalidRequest(
                f"the model's chat template rejects these messages: {str(error)[:200]}",
                param="messages",
                code="chat_template_error",
            ) from error
        if room < 0:
            raise InvalidRequest(
                f"the messages make a prompt of more than {max_chars} characters; send less",
                param="messages",
                code="string_above_max_length",
            )
        return "".join(pieces)


def _compiled(source: str, where: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template of {where} has an error in line {error.lineno}: {error.message}"
        ) from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of {where} cannot be used: {error}") from error


class GenerationBlock(Extension):
    """`{% generation %}` marks text for training. Here its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers. Unlike Jinja's own it does not escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
