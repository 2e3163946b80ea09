"""The messages of a request on its way from a client to the scheduler, and its cancellation."""

from __future__ import annotations

from typing import Literal, TypeAlias

from aserve.errors import ErrorInfo
from aserve.messages.base import CancelReason, Message, Record
from aserve.messages.changes import Amend, ChangeSettings
from aserve.picture import Picture, PictureSource


class Grammar(Record, frozen=True):
    """The grammar that an output must match. `source` is the JSON text of a schema, a regular
    expression, EBNF in llama.cpp's notation, a JSON list of texts, or the JSON of one of
    xgrammar's structural tags; json_object needs none.
    `param` is the request's field, for error messages.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag"]
    source: str = ""
    param: str = "structured_outputs"


class ReasoningParams(Record, frozen=True):
    """The reasoning of a chat's output. `parser` and `tool_parser` name the families whose tags
    begin and end it; at `max_tokens` reasoning tokens its end is forced, with None never.
    """

    parser: str
    tool_parser: str | None = None
    max_tokens: int | None = None


class SamplingParams(Record, frozen=True):
    """The sampling parameters of a request, validated by http/ or engine.py.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. `seed` is always set: http draws
    one for a request that has none. `logprobs` is the number of alternatives per token, None for no
    logprobs, and `prompt_logprobs` is the same for the prompt's tokens; `raw_logprobs` are
    logprobs before penalties, bias and masks. `echo` returns the prompt's text before the output.
    `max_tokens` None means the rest of the context, until the tokenizer actor resolves it; with 0
    only the prompt is computed. `include_stop_str_in_output` keeps the stop string or stop token in
    the text. `kept_special_tokens` are not skipped with the others, because a parser of
    the output reads them. `return_token_ids` returns the ids of the output and of the prompt. If
    `allowed_token_ids` is not empty, only these are sampled, as in vLLM.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[str, ...] = ()
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # in logprobs a token is spelled `token_id:N`
    logprobs: int | None = None
    raw_logprobs: bool = False
    prompt_logprobs: int | None = None
    echo: bool = False
    n: int = 1
    grammar: Grammar | None = None
    reasoning: ReasoningParams | None = None


EMBED = SamplingParams(seed=0, max_tokens=0)  # of an embedding request: nothing is sampled


class TextPrompt(Record, frozen=True, tag="text"):
    text: str
    add_special_tokens: bool = True  # those that the tokenizer adds to a text, such as BOS


class TokenPrompt(Record, frozen=True, tag="tokens"):
    token_ids: tuple[int, ...]


class ChatPrompt(Record, frozen=True, tag="chat"):
    """A chat for the model's template. `messages` and `tools` are the JSON that the client sent;
    `variables` is a JSON object of further template variables. The template adds special tokens
    and, with `add_generation_prompt`, the start of the assistant's message. With
    `continue_final_message` the prompt ends with the content of the last message, and the output
    continues it.
    """

    messages: bytes
    tools: bytes | None = None
    variables: bytes | None = None
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    pictures: tuple[PictureSource, ...] = ()  # of the parts of type image, in order


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class GenerateRequest(Message, frozen=True):
    """http -> tokenizer. The server makes `request_id`. A request that `embeds` has max_tokens 0
    and returns an embedding of its prompt. `timeout_s` counts from the arrival at the tokenizer to
    the end, and `max_queue_s` to the launch of its first step. A request that cannot end within its
    `strict_timeout_s` is refused at once. `outputs` has one int32 array per child: the first tokens
    of its output, which are known; the request continues after them. Their text counts as sent,
    unless the request `sends_outputs`. `prediction` is a text that the output may repeat in parts;
    it saves time and never changes the output. `client` is an opaque id: the scheduler shares the
    engine fairly between clients.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    namespace: str = ""
    priority: int = 0
    timeout_s: float | None = None
    strict_timeout_s: float | None = None
    max_queue_s: float | None = None
    started_s: float | None = None  # when it began on time.monotonic, if it is to be timed
    traceparent: str = ""  # W3C Trace Context
    # keeps only that many last tokens of the prompt; -1: as many as leave room for max_tokens
    truncate_prompt_tokens: int | None = None
    truncates_end: bool = False  # it keeps the first tokens instead
    embeds: bool = False
    outputs: tuple[bytes, ...] = ()  # int32 [outputs of child i]
    sends_outputs: bool = False
    client: str = ""
    lora_slot: int = 0  # of its adapter on the device, 0 for none; `namespace` names the adapter
    prediction: str = ""


class ReasoningIds(Record, frozen=True):
    """ReasoningParams as token ids. Each tag is a sequence of ids, and the first of `closes` is the
    one that is forced. With `is_open` the output begins inside of the reasoning.
    """

    opens: tuple[tuple[int, ...], ...]
    closes: tuple[tuple[int, ...], ...]
    is_open: bool = False
    max_tokens: int | None = None


class OpenText(Message, frozen=True):
    """tokenizer -> detokenizer, before the AdmitRequest. `outputs` and `sends_outputs` are those of
    the GenerateRequest.
    """

    request_id: str
    prompt_len: int
    sampling: SamplingParams
    prompt_ids: bytes = b""  # int32 [prompt_len], if the client wants them
    # the text of each prompt token, if the prompt is echoed or scored
    prompt_texts: tuple[str, ...] = ()
    outputs: tuple[bytes, ...] = ()  # int32 [outputs of child i]
    sends_outputs: bool = False
    prompt_tail: str = ""  # the end of a chat's prompt, for the parsers of outputs
    reasoning: ReasoningIds | None = None


class AdmitRequest(Message, frozen=True):
    """tokenizer -> scheduler. `outputs`, `embeds` and `client` are those of the GenerateRequest.

    `deadline_s` is the end of its timeout on the clock of time.monotonic, which all processes of a
    machine share, `strict_deadline_s` that of its strict timeout, and `queue_deadline_s` is the end
    of its longest wait. `end_ids` are the token
    ids that end a sequence: eos, unless it is ignored, and stop_token_ids. `bad_word_ids` are the
    token sequences that must not be sampled. `sampling.max_tokens` is resolved: prompt_len +
    max_tokens <= max_model_len.
    """

    request_id: str
    prompt_ids: bytes  # int32 [prompt_len]
    sampling: SamplingParams
    end_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None
    strict_deadline_s: float | None = None
    queue_deadline_s: float | None = None
    tokenized_s: float | None = None  # on the same clock, if it is timed
    outputs: tuple[bytes, ...] = ()  # int32 [outputs of child i]
    is_resumed: bool = False  # an earlier engine let it in, so it is not refused for a full queue
    embeds: bool = False
    # the keys of the prompt's full pages in the prefix tree, KEY_BYTES each; the scheduler computes
    # those that are missing
    page_keys: bytes = b""
    client: str = ""
    lora_slot: int = 0  # as in the GenerateRequest
    prediction_ids: bytes = b""  # int32, the tokens of the prediction
    awaits_kv: bool = False  # a transfer brings the KV of its tokens: see ReceiveKv
    sends_kv: bool = False  # another engine wants the KV of its prompt: see SendKv
    # Each token of the prompt sees only those before it. Without this, the prompt is computed in
    # one step, and its KV is of use to no other sequence.
    is_causal: bool = True
    reasoning: ReasoningIds | None = None
    pictures: tuple[Picture, ...] = ()


class Cancel(Message, frozen=True):
    """Ends a child, or with None all children. http, the detokenizer and the scheduler actor's
    timers send it to the scheduler, which ignores it for an unknown request. `kept` counts for the
    reason "stop" alone: the number of the child's output tokens up to the stop string.
    """

    request_id: str
    child: int | None
    kept: int
    reason: CancelReason


class FailRequest(Message, frozen=True):
    """Ends all children of the request with this error. The mask actor and the scheduler actor's
    timers send it to the scheduler, which ignores it for an unknown request.
    """

    request_id: str
    error: ErrorInfo


# A Cancel or Amend takes the same path as its request, so that it cannot overtake it.
TokenizerEvent: TypeAlias = GenerateRequest | Cancel | Amend
RequestEvent: TypeAlias = AdmitRequest | Cancel
# messages from the text side to the engine core
EngineEvent: TypeAlias = RequestEvent | Amend | ChangeSettings
