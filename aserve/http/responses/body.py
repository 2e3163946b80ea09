"""The body of POST /v1/responses: OpenAI's fields, and the sampling fields of other endpoints."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from aserve.http.openai.schema import ContentPart, Effort, GenerationBody

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
    """An item of the input: a message, a function call and its output, reasoning, or a summary of
    /v1/responses/compact. `type` says which of the fields it has; without one it is a message.
    """

    type: str | None = None
    role: Role | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, omit_defaults=True):
    format: TextFormat | None = None


class ResponseTool(msgspec.Struct):
    """A function that the model may call."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(msgspec.Struct):
    type: str
    name: str


class ResponseToolChoice(msgspec.Struct, omit_defaults=True):
    """A choice of one function, or of the tools that may be called."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class ReasoningConfig(msgspec.Struct):
    """OpenAI's fields, and OpenRouter's limit of reasoning tokens."""

    effort: Effort | None = None
    summary: str | None = None
    max_tokens: int | UnsetType | None = UNSET


class ConversationRef(msgspec.Struct, frozen=True):
    id: str


class ResponseBody(GenerationBody, kw_only=True):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Includable] | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    thinking_token_budget: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    conversation: str | ConversationRef | None = None
