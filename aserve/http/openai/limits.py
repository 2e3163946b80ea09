"""The ranges of a body's numbers, and the largest sizes of its lists and texts."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import NamedTuple

from aserve.errors import InvalidRequest
from aserve.http.openai.schema import ContentPart, GenerationBody
from aserve.messages.base import MAX_INT32, MAX_INT64

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128
MAX_SALT_CHARS = 128
MAX_RID_CHARS = 128
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_SEQUENCES = 512  # prompts times n in one call


class Range(NamedTuple):
    low: float
    high: float


RANGES = {
    "n": Range(1, 128),
    "dimensions": Range(1, MAX_INT32),
    "best_of": Range(1, 128),
    "truncate_prompt_tokens": Range(-1, MAX_INT32),
    "max_tokens": Range(0, MAX_INT32),
    "max_completion_tokens": Range(0, MAX_INT32),
    "max_output_tokens": Range(1, MAX_INT32),
    "min_tokens": Range(0, MAX_INT32),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1),
    "top_k": Range(-1, MAX_INT32),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 100),
    "seed": Range(-MAX_INT64 - 1, MAX_INT64),
    "priority": Range(-MAX_INT32 - 1, MAX_INT32),
    "timeout": Range(0.001, 86_400),
    "deadline_ms": Range(1, 86_400_000),
    "max_queue_ms": Range(1, 86_400_000),
    "X-Deadline-Ms": Range(1, 86_400_000),
    "X-Max-Queue-Ms": Range(1, 86_400_000),
    "top_logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "thinking_token_budget": Range(-1, MAX_INT32),
    "max_thinking_tokens": Range(-1, MAX_INT32),
    "reasoning_budget": Range(-1, MAX_INT32),
    "thinking_budget": Range(-1, MAX_INT32),
}


def check_limits(body: GenerationBody) -> None:
    for name in RANGES.keys() & set(body.__struct_fields__):
        value = getattr(body, name)
        if value is not None:
            check_range(value, name)
    check_stops(stops_of(body))
    check_length(body.allowed_token_ids or (), MAX_ALLOWED_TOKEN_IDS, param="allowed_token_ids")
    if body.allowed_token_ids == []:
        raise InvalidRequest(
            "Invalid 'allowed_token_ids': the list is empty, so nothing could be sampled.",
            param="allowed_token_ids",
            code="empty_array",
        )
    check_length(body.bad_words or (), MAX_BAD_WORDS, param="bad_words")
    for word in body.bad_words or ():
        check_text(word, MAX_BAD_WORD_CHARS, param="bad_words")
    check_text(body.cache_salt or "", MAX_SALT_CHARS, param="cache_salt")
    check_text(body.request_id or "", MAX_RID_CHARS, param="request_id")
    check_text(body.rid or "", MAX_RID_CHARS, param="rid")
    check_truncation(body.truncate_prompt_tokens)
    check_length(body.stop_token_ids or (), MAX_STOP_TOKEN_IDS, param="stop_token_ids")
    check_length(body.logit_bias or (), MAX_LOGIT_BIAS, param="logit_bias")
    for token_id, bias in (body.logit_bias or {}).items():
        check_within(bias, Range(-MAX_BIAS, MAX_BIAS), param=f"logit_bias.{token_id}")


def check_truncation(num_tokens: int | None, *, param: str = "truncate_prompt_tokens") -> None:
    """Refuses to keep 0 tokens of a prompt. `RANGES` bounds the number otherwise."""
    if num_tokens == 0:
        raise InvalidRequest(
            f"Invalid '{param}': 0 would leave nothing of the prompt. Expected a positive number, "
            "or -1 for as many as fit.",
            param=param,
            code="invalid_value",
        )


def check_range(value: float, name: str) -> None:
    check_within(value, RANGES[name], param=name)


def check_within(value: float, limit: Range, *, param: str) -> None:
    if limit.low <= value <= limit.high:
        return
    kind = "integer" if isinstance(value, int) else "decimal"
    side, bound, word = (
        ("below_min", limit.low, ">=") if value < limit.low else ("above_max", limit.high, "<=")
    )
    raise InvalidRequest(
        f"Invalid '{param}': {kind} {side.replace('_', ' ')} value. "
        f"Expected a value {word} {bound}, but got {str(value)[:40]} instead.",
        param=param,
        code=f"{kind}_{side}_value",
    )


def stops_of(body: GenerationBody) -> list[str]:
    if body.stop is None:
        return []
    return [body.stop] if isinstance(body.stop, str) else body.stop


def check_stops(stops: list[str]) -> None:
    check_length(stops, MAX_STOPS, param="stop")
    for stop in stops:
        if not stop:
            raise InvalidRequest(
                "Invalid 'stop': a stop string must not be empty.",
                param="stop",
                code="string_below_min_length",
            )
        check_text(stop, MAX_STOP_CHARS, param="stop")


def prediction_of(body: GenerationBody) -> str:
    """Returns the text that the client predicts for the output."""
    if body.prediction is None:
        return ""
    content = body.prediction.content
    parts = [ContentPart("text", content)] if isinstance(content, str) else content
    for part in parts:
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                "Invalid 'prediction.content': each part needs the type 'text' and a text, but "
                f"one has the type {part.type[:40]!r}.",
                param="prediction",
                code="invalid_value",
            )
    text = "".join(part.text or "" for part in parts)
    check_text(text, MAX_INT32, param="prediction")
    return text


def check_text(text: str, high: int, *, param: str) -> None:
    """Raises if a text is too long or not valid Unicode, which can happen in a program that embeds
    the engine.
    """
    if len(text) > high:
        raise InvalidRequest(
            f"Invalid '{param}': string too long. Expected at most {high} characters, "
            f"but got {len(text)}.",
            param=param,
            code="string_above_max_length",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"Invalid '{param}': lone surrogate at character {error.start}.",
            param=param,
            code="invalid_unicode",
        ) from error


def check_length(items: Sized, high: int, *, param: str) -> None:
    length = len(items)
    if length > high:
        raise InvalidRequest(
            f"Invalid '{param}': array too long. Expected at most {high} items, but got {length}.",
            param=param,
            code="array_above_max_length",
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """The client behind a request, and its rights. The defaults are for a program that embeds the
    engine. Requests share cached prefixes only within a `namespace`. A stored response is visible
    only to its `owner`; on a server without API keys all clients are one owner.
    """

    client: str = ""
    namespace: str = ""
    owner: str = ""
    may_set_priority: bool = True
    max_sequences: int = MAX_SEQUENCES  # of one call: prompts times n

    def check_priority(self, priority: int | None) -> None:
        if priority and not self.may_set_priority:
            raise InvalidRequest(
                f"Invalid 'priority': got {priority}, but only 0 is allowed. The server shares its "
                "engine fairly between clients unless it is started with "
                "--enable-priority-scheduling or the request has the admin API key.",
                param="priority",
                code="priority_not_allowed",
            )

    def check_sequences(self, num_prompts: int, n: int) -> None:
        """Raises above the limit. WHY: one request with more sequences than the engine has rows
        would make all other clients wait.
        """
        num_sequences = num_prompts * n
        if num_sequences > self.max_sequences:
            raise InvalidRequest(
                f"This request asks for {num_sequences} sequences ({num_prompts} prompts x {n} "
                f"choices each), but at most {self.max_sequences} are allowed. Send several "
                "requests, or start the server with a larger --max-sequences-per-request.",
                param="n" if num_prompts <= self.max_sequences else "prompt",
                code="too_many_sequences",
            )

    def namespace_of(self, cache_salt: str | None) -> str:
        """Returns the prefix-cache namespace for a salt. NOTE: a client's namespace has a fixed
        length and no slash, so no salt can lead into another client's namespace, or into that of a
        LoRA adapter.
        """
        salt = cache_salt or ""
        return f"{self.namespace}/{salt}" if self.namespace or salt else ""


EMBEDDED = Caller()  # a program that embeds the engine
