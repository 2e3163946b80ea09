"""The records that clients get: a response, its output and its usage, with OpenAI's names."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from aserve.errors import ErrorInfo
from aserve.http.long_json import JsonList
from aserve.http.openai.answers import LogprobEntry
from aserve.http.responses.body import (
    ConversationRef,
    ReasoningConfig,
    ResponseTool,
    ResponseToolChoice,
    TextConfig,
)
from aserve.messages.output import Usage

Status: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class Part(msgspec.Struct, frozen=True, tag_field="type"):
    text: str


class InputText(Part, frozen=True, tag="input_text"):
    pass


class OutputText(Part, frozen=True, tag="output_text"):
    annotations: tuple[str, ...] = ()  # only tools make annotations
    logprobs: tuple[LogprobEntry, ...] | JsonList = ()


class InputImage(msgspec.Struct, frozen=True, tag="input_image", tag_field="type"):
    image_url: str
    detail: str = "auto"


class InputMessage(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    id: str
    role: str
    content: tuple[InputText | InputImage, ...]
    status: ItemStatus = "completed"


class OutputMessage(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    id: str
    status: ItemStatus
    content: tuple[OutputText, ...] = ()
    role: str = "assistant"


class ReasoningText(Part, frozen=True, tag="reasoning_text"):
    pass


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning", tag_field="type"):
    """The model's reasoning as it is; it is never summarised."""

    id: str
    status: ItemStatus
    content: tuple[ReasoningText, ...] = ()
    summary: tuple[str, ...] = ()


class FunctionCallItem(msgspec.Struct, frozen=True, tag="function_call", tag_field="type"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(msgspec.Struct, frozen=True, tag="function_call_output", tag_field="type"):
    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


class CompactionItem(msgspec.Struct, frozen=True, tag="compaction", tag_field="type"):
    id: str
    encrypted_content: str


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str
    type: str
    param: str | None


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response. The fields down to `seed` repeat the request and never change. `seed` is an
    extension.
    """

    id: str
    created_at: int  # seconds since 1970
    model: str
    object: Literal["response"] = "response"
    instructions: str | None
    max_output_tokens: int | None
    previous_response_id: str | None
    conversation: ConversationRef | None = None
    store: bool
    temperature: float
    top_p: float
    top_logprobs: int
    text: TextConfig
    tool_choice: str | ResponseToolChoice
    metadata: dict[str, str]
    user: str | None
    tools: tuple[ResponseTool, ...] = ()
    parallel_tool_calls: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    background: bool = False
    reasoning: ReasoningConfig = msgspec.field(default_factory=ReasoningConfig)
    seed: int
    status: Status = "in_progress"
    output: tuple[OutputItem, ...] = ()
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None


class InputTokens(msgspec.Struct, frozen=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ConversationObject(msgspec.Struct, frozen=True):
    id: str
    created_at: int  # seconds since 1970
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class DeletedConversation(msgspec.Struct, frozen=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True):
    data: list[InputMessage | OutputItem | FunctionOutputItem | CompactionItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def usage_of(usage: Usage, *, num_reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(num_reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def error_of(info: ErrorInfo) -> ResponseError:
    """Converts an error. WHY so few codes: OpenAI's clients know a closed list."""
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(info.status, "server_error")
    return ResponseError(code, info.message, info.type, info.param)
