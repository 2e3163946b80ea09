"""Requests on their way from a client to the scheduler, and their cancellation."""

from __future__ import annotations

from typing import Literal, TypeAlias

from aserve.errors import ErrorInfo
from aserve.messages.base import CancelReason, Message, Record


def stamp_of(iteration: int) -> int:
    """The number by which the relay names the step that wrote a row: the iteration while that is
    below 2^31, then counted from 1 again, so that it fits int32. 0 stays 0: the number of a step
    that writes no request's row.
    """
    if not iteration:
        return 0
    return 1 + (iteration - 1) % (2**31 - 1)


class Grammar(Record, frozen=True):
    """The language that an output must be in. `source` is the JSON text of a schema, a regular
    expression, EBNF as llama.cpp writes it, or a JSON list of texts; json_object needs none.
    `param` is the field that asked for it, which errors name.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice"]
    source: str = ""
    param: str = "structured_outputs"


class SamplingParams(Record, frozen=True):
    """What a client may ask of sampling, already validated (http/ and engine.py do that).

    temperature 0 is greedy; top_k 0 and top_p 1 and min_p 0 are off. `seed` is always set: http
    draws one for a request that has none. `logprobs` is the number of alternatives per token, None
    for no logprobs at all, and `prompt_logprobs` the same of the prompt's tokens; `raw_logprobs`
    are those before penalties, bias and masks. `echo` gives the prompt's text back before the
    output. `max_tokens` None means the rest of the context; the tokenizer actor resolves it. With 0
    the prompt is computed and nothing is sampled.
    `include_stop_str_in_output` shows what ended the text, `return_token_ids` also the prompt's
    ids. Only `allowed_token_ids` are sampled, and what ends a sequence; empty allows all.
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
    return_token_ids: bool = False
    logprobs: int | None = None
    raw_logprobs: bool = False
    prompt_logprobs: int | None = None
    echo: bool = False
    n: int = 1
    grammar: Grammar | None = None


EMBED = SamplingParams(seed=0, max_tokens=0)  # of a request that embeds: nothing is sampled


class TextPrompt(Record, frozen=True, tag="text"):
    text: str
    add_special_tokens: bool = True  # what the tokenizer puts around a text


class TokenPrompt(Record, frozen=True, tag="tokens"):
    token_ids: tuple[int, ...]


class ChatPrompt(Record, frozen=True, tag="chat"):
    """`messages` is the JSON of the message list and `tools` that of the tools, as the client
    sent them; `variables` is that of an object with what else the template may look at. Special
    tokens are the template's to add, and it opens the assistant's turn.
    """

    messages: bytes
    tools: bytes | None = None
    variables: bytes | None = None
    add_special_tokens: bool = False
    add_generation_prompt: bool = True


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


class GenerateRequest(Message, frozen=True):
    """http -> tokenizer. `request_id` is made by the server and is matched whole, never by
    prefix. One that `embeds` is answered with an embedding of its prompt, and has max_tokens 0.
    `timeout_s` counts from its arrival at the tokenizer, and covers everything that follows.
    `outputs` has one int32 array per child: the tokens that an earlier engine generated for it,
    and its text side was given. The request goes on behind them, and their text is not sent again.
    `client` is an opaque id of who asks; the scheduler shares the engine fairly between clients.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    namespace: str = ""
    priority: int = 0
    timeout_s: float | None = None
    # the last so many tokens of the prompt, -1 for all that leave room for max_tokens
    truncate_prompt_tokens: int | None = None
    embeds: bool = False
    outputs: tuple[bytes, ...] = ()  # int32 [outputs of child i]
    client: str = ""


class OpenText(Message, frozen=True):
    """tokenizer -> detokenizer, before the AdmitRequest: what the text side of a request needs
    to know. `outputs` are those of the GenerateRequest: their text counts as sent.
    """

    request_id: str
    prompt_len: int
    sampling: SamplingParams
    prompt_ids: bytes = b""  # int32 [prompt_len] where the client wants to see them
    # what each token of the prompt adds to its text, where it is echoed or scored
    prompt_texts: tuple[str, ...] = ()
    outputs: tuple[bytes, ...] = ()  # int32 [outputs of child i]


class AdmitRequest(Message, frozen=True):
    """tokenizer -> scheduler. `outputs` are those of the GenerateRequest. `deadline_s` is when its
    timeout ends, by time.monotonic, which all processes of a machine share.

    `end_ids` are the token ids that end a sequence (eos and stop_token_ids; empty with ignore_eos
    and no stops), `bad_word_ids` the spellings of bad words.
    `sampling.max_tokens` is resolved: prompt_len + max_tokens <= max_model_len.
    It `embeds` as its GenerateRequest does, and comes from the same `client`.
    """

    request_id: str
    prompt_ids: bytes  # int32 [prompt_len]
    sampling: SamplingParams
    end_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None
    outputs: tuple[bytes, ...] = ()  # int32 [outputs of child i]
    embeds: bool = False
    # the cache keys of the prompt's whole pages, 16 bytes each (cache/keys.py); the scheduler
    # computes those that are not here
    page_keys: bytes = b""
    client: str = ""
    awaits_kv: bool = False  # a transfer brings the KV of its tokens: see ReceiveKv
    # Each token of the prompt sees only those before it. Without this, the prompt is computed in
    # one step, and its KV is of use to no other sequence.
    is_causal: bool = True


class Cancel(Message, frozen=True):
    """To the scheduler from http, the detokenizer or the scheduler actor's timer. child None: all
    children.

    `kept` is the number of output tokens that the client got; for an unknown request the message is
    ignored.
    """

    request_id: str
    child: int | None
    kept: int
    reason: CancelReason


class FailRequest(Message, frozen=True):
    """masks -> scheduler: the request ends with this error, all its children at once. For an
    unknown request the message is ignored.
    """

    request_id: str
    error: ErrorInfo


# A Cancel goes the same way as its request, so that it cannot overtake it.
TokenizerEvent: TypeAlias = GenerateRequest | Cancel


EngineEvent: TypeAlias = AdmitRequest | Cancel  # what enters the engine, from the text side
