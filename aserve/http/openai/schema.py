"""The bodies of OpenAI's endpoints, with the extensions of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from aserve.errors import InvalidRequest
from aserve.messages.base import MAX_INT32
from aserve.messages.requests import Prompt, TextPrompt, TokenPrompt

# The ids that fit in a message. The tokenizer checks which of them the model has.
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=MAX_INT32)]

# Where a prompt is truncated: on the left its end is kept, which is the default.
Side: TypeAlias = Literal["left", "right"]

# A prompt field: a text, a list of texts, a list of ids, or a list of lists of ids.
TextsOrIds: TypeAlias = str | list[str | TokenId | list[TokenId]]


def null_value() -> msgspec.Raw:
    """Returns the default of a field that is decoded later. JSON schemas leave out the default of a
    factory, and cannot express a Raw.
    """
    return msgspec.Raw(b"null")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    include_timings: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    """A JSON schema. `strict` has no effect: the output always follows the schema."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class LegacyTag(msgspec.Struct):
    """A schema between two texts: a part of the older form of a structural tag."""

    begin: str
    end: str
    schema: dict[str, Any] = {}


class ResponseFormat(msgspec.Struct):
    """The type structural_tag has a `format`, or the older `structures` with their `triggers`."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[LegacyTag] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct):
    """A constraint on the output, as in vLLM: exactly one of the first six fields is set. `json` is
    a schema or its text, `grammar` is EBNF, and `structural_tag` is a tag or its text. The others
    are accepted with the values that change nothing.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class ImageUrl(msgspec.Struct):
    """`detail` has no effect: the model's own limits say how large a picture is."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    refusal: str | None = None


class PicturePart(ContentPart, kw_only=True):
    """A part with a picture, as all endpoints pass it on. `param` is its place in the body."""

    url: str
    param: str


class Prediction(msgspec.Struct):
    """A text that the output may repeat in parts, such as the file that a model edits."""

    type: Literal["content"]
    content: str | list[ContentPart]


class GenerationBody(msgspec.Struct, kw_only=True):
    """The fields that all generation endpoints share. A lower `priority` runs first. `timeout` is
    in seconds, for the whole request, and so is `deadline_ms` in milliseconds; `max_queue_ms` is
    for the time before its first step, and `include_timings` explains its times. The fields from
    `guided_json` to `json_schema` are other names of fields of `structured_outputs`: those of older
    versions of vLLM, of SGLang and of llama.cpp. `request_id` and `rid` are the client's own id,
    by which the request can be found while it runs. `spaces_between_special_tokens` has no effect:
    texts of tokens are joined as they are.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    resumable: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name of the same
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    cache_salt: str | None = None
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    seed: int | None = None
    priority: int | None = None
    timeout: float | None = None
    deadline_ms: float | None = None
    max_queue_ms: float | None = None
    include_timings: bool | None = None
    prediction: Prediction | None = None
    request_id: str | None = None
    rid: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """A `receipt` says what the answer was computed from, and implies return_token_ids."""

    prompt: TextsOrIds | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    receipt: bool | None = None

    def __post_init__(self) -> None:
        self.return_token_ids = self.return_token_ids or self.receipt


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """A message. `function_call` is the older form of `tool_calls`, and `reasoning` another name
    of `reasoning_content`. A `refusal` is text of the assistant's.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None


class FunctionSpec(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: str
    function: FunctionSpec


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: FunctionName
    type: str = "function"


class AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoiceObject(msgspec.Struct):
    """A choice of one function, or of the tools that may be called."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class Thinking(msgspec.Struct):
    """The switch of DeepSeek's and Zhipu's APIs for reasoning, with Anthropic's limit of tokens."""

    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = None


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(msgspec.Struct):
    """OpenRouter's switch for reasoning, with a limit of tokens. `exclude` leaves it out."""

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: int | None = None
    exclude: bool | None = None


class ChatBody(GenerationBody, kw_only=True):
    """`functions` and `function_call` are the older forms of `tools` and `tool_choice`. The fields
    from `thinking_token_budget` to `thinking_budget` are the names that vLLM, SGLang, llama.cpp and
    Qwen's API have for the limit of reasoning tokens. A `receipt` says what the answer was computed
    from, and implies return_token_ids.
    """

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    tools: msgspec.Raw = msgspec.field(default_factory=null_value)
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    functions: msgspec.Raw = msgspec.field(default_factory=null_value)
    function_call: str | FunctionName | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None
    reasoning_budget: int | None = None
    thinking_budget: int | None = None
    receipt: bool | None = None

    def __post_init__(self) -> None:
        self.return_token_ids = self.return_token_ids or self.receipt


class EmbeddingBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: TextsOrIds | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    prompt_name: str | None = None  # of config_sentence_transformers.json
    user: str | None = None
    priority: int | None = None
    timeout: float | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of /tokenize, with either a text or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: msgspec.Raw = msgspec.field(default_factory=null_value)
    tool_choice: str | ToolChoiceObject | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


def prompts_of(given: TextsOrIds | None, *, param: str, with_special: bool = True) -> list[Prompt]:
    """Returns the prompts of a field. Raises if it is missing, empty or mixed."""
    if given is None:
        raise InvalidRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    items = [given] if isinstance(given, str) else given
    if not items:
        raise InvalidRequest(
            f"Invalid '{param}': the list is empty.", param=param, code="empty_array"
        )
    kinds = set(map(type, items))  # PERF: a prompt may have hundreds of thousands of ids
    if len(kinds) > 1:
        raise InvalidRequest(
            f"Invalid '{param}': a list holds texts, token ids or lists of token ids, "
            "not a mixture.",
            param=param,
            code="invalid_type",
        )
    if kinds == {int}:
        return [token_prompt([item for item in items if isinstance(item, int)])]
    return [
        TextPrompt(item, with_special) if isinstance(item, str) else token_prompt(item)
        for item in items
        if not isinstance(item, int)
    ]


def token_prompt(token_ids: Sequence[int]) -> TokenPrompt:
    return TokenPrompt(tuple(token_ids))
