"""The body of POST /v1/responses: OpenAI's fields, and the sampling fields of other endpoints."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from aserve.http.openai.schema import ContentPart, GenerationBody, TypedObject

Role: TypeAlias = Literal["user", "assistant", "system", "developer"]

LOGPROBS = "message.output_text.logprobs"
# All but the logprobs concern items that this server never generates, so they have no effect.
Includable: TypeAlias = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]


class InputItem(msgspec.Struct):
    """A message of the input, or the output item of an earlier response."""

    type: str | None = None
    role: Role | None = None
    content: str | list[ContentPart] | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, omit_defaults=True):
    format: TextFormat | None = None


class ResponseBody(GenerationBody, kw_only=True):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Includable] | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None
    tools: list[TypedObject] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
