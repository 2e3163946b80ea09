"""Renders the messages and tools of a chat to the text of its prompt."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from aserve.errors import InvalidRequest
from aserve.messages.requests import ChatPrompt
from aserve.text.plain_content import PlainContent
from aserve.text.template import ChatTemplate

T = TypeVar("T")

# Stands behind the content of the message that the output continues. The rendered text is cut
# there, so that the template's end of the turn is left out.
CONTINUE_HERE = "\uf8ffcontinue here\uf8ff"


class RenderedChat(NamedTuple):
    """The text of a prompt, and the mark that breaks the client's special tokens in it."""

    text: str
    mark: str | None


def render_chat(
    prompt: ChatPrompt, template: ChatTemplate | None, plain: PlainContent | None
) -> RenderedChat:
    """Renders a chat. `plain` keeps special tokens in the client's values plain text; with None
    they are control tokens.
    """
    if template is None:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions with a prompt instead",
            param="messages",
            code="no_chat_template",
        )
    messages = _decode(prompt.messages, list[dict[str, Any]], param="messages")
    tools, variables = None, None
    if prompt.tools is not None:
        tools = _decode(prompt.tools, list[dict[str, Any]], param="tools")
    if prompt.variables is not None:
        variables = _decode(prompt.variables, dict[str, Any], param="chat_template_kwargs")
    mark = None
    if plain is not None:
        (messages, tools, variables), mark = plain.break_special([messages, tools, variables])
    if prompt.continue_final_message:
        messages[-1]["content"] = f"{messages[-1].get('content') or ''}{CONTINUE_HERE}"
    text = template.render(
        messages,
        tools=tools,
        variables=variables,
        add_generation_prompt=prompt.add_generation_prompt,
    )
    return RenderedChat(_without_end(text) if prompt.continue_final_message else text, mark)


def _without_end(text: str) -> str:
    """Returns the text up to the end of the final message's content."""
    end = text.rfind(CONTINUE_HERE)
    if end < 0:
        raise InvalidRequest(
            "Invalid 'continue_final_message': the model's chat template does not show the content "
            "of the final message.",
            param="continue_final_message",
            code="invalid_value",
        )
    return text[:end]


def _decode(data: bytes, kind: type[T], *, param: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"'{param}' cannot be decoded or is nested too deeply: {str(error)[:100]}",
            param=param,
            code="invalid_value",
        ) from error
