"""Renders a model's chat template to a prompt text, in a sandbox and bounded in time and size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2

from aserve.errors import ConfigError, InvalidRequest
from aserve.text.template_environment import TemplateEnvironment, limited

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
    `variables` are those of every prompt, such as the special tokens.
    """

    __slots__ = ("_plain", "_variables", "_with_tools", "source")

    def __init__(
        self,
        source: str,
        *,
        with_tools: str | None = None,
        where: str = "the model",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = source if with_tools is None else with_tools
        self._plain = _compiled(source, where)
        self._with_tools = self._plain if with_tools is None else _compiled(with_tools, where)
        self._variables = dict(variables or {})

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
        seen = self._variables | dict(variables or {}) | own
        pieces: list[str] = []
        room = max_chars
        try:
            for piece in template.generate(limited(seen)):
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
        return TemplateEnvironment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template of {where} has an error in line {error.lineno}: {error.message}"
        ) from error
    # Python cannot compile what is nested too deeply.
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
        raise ConfigError(f"the chat template of {where} cannot be used: {error}") from error
