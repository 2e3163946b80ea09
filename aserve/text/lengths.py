"""The lengths of a prompt and its output: how both fit in the context of the model."""

from __future__ import annotations

import msgspec

from aserve.errors import ContextTooLong, InvalidRequest
from aserve.messages.base import Record
from aserve.messages.executor import Task
from aserve.messages.requests import ChatPrompt, GenerateRequest, SamplingParams, TextPrompt


class PromptLimits(Record, frozen=True):
    """The limits of a model, and the sizes that prompts depend on."""

    max_model_len: int
    vocab_size: int  # of the model, which may be padded beyond the tokenizer's
    max_new_tokens: int | None = None  # the default of max_tokens; None: the rest of the context
    page_size: int = 0  # tokens per page of the prefix cache; 0 without a prefix cache
    auto_truncate: bool = False  # what does not fit in the context is shortened, not refused
    task: Task = "generate"
    whole_prompts: bool = False  # prompts are not causal, so they are computed in one step
    affixes: tuple[int, int] = (0, 0)  # tokens before and behind a text, which are never cut off


def check_task(request: GenerateRequest, limits: PromptLimits) -> None:
    """Refuses to generate with a model that only embeds or classifies, whatever the endpoint is."""
    if request.embeds or limits.task == "generate":
        return
    does, path = {"embed": ("embeds", "/v1/embeddings")}.get(
        limits.task, ("classifies", "/classify")
    )
    raise InvalidRequest(
        f"This model {does} texts and generates nothing: use POST {path}, or start the server with "
        "a model that generates.",
        param="model",
        code="model_does_not_generate",
    )


def truncate(ids: list[int], request: GenerateRequest, limits: PromptLimits) -> list[int]:
    """Returns the last or first `truncate_prompt_tokens` ids; -1 keeps as many as leave room for
    the output, which is one token without max_tokens. With `auto_truncate`, ids at the end are
    dropped that leave no room for one token. The special tokens around a text to embed stay.
    """
    kept, max_tokens = request.truncate_prompt_tokens, request.sampling.max_tokens
    has_affixes = request.embeds and isinstance(request.prompt, TextPrompt)
    affixes = limits.affixes if has_affixes else (0, 0)
    if kept is not None:
        if kept < 0:
            kept = limits.max_model_len - (1 if max_tokens is None else max_tokens)
        if kept > 0:
            ids = _cut(ids, kept, affixes, keeps_start=request.truncates_end)
    if limits.auto_truncate:
        ids = _cut(ids, limits.max_model_len - (max_tokens != 0), affixes, keeps_start=True)
    return ids


def _cut(ids: list[int], kept: int, affixes: tuple[int, int], *, keeps_start: bool) -> list[int]:
    before, behind = affixes
    if len(ids) <= kept or kept <= before + behind:
        return ids[:kept] if keeps_start else ids[-kept:]
    inner, room = ids[before : len(ids) - behind], kept - before - behind
    inner = inner[:room] if keeps_start else inner[-room:]
    return [*ids[:before], *inner, *ids[len(ids) - behind :]]


def resolve_lengths(
    request: GenerateRequest, prompt_len: int, limits: PromptLimits
) -> SamplingParams:
    """Sets max_tokens to the model's default if the request has none. If the prompt and the output
    do not fit in the context, it raises, or with `auto_truncate` lowers max_tokens.
    """
    sampling = request.sampling
    where = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    room = limits.max_model_len - prompt_len
    asked = sampling.max_tokens
    max_tokens = _default_max_tokens(sampling, room, limits) if asked is None else asked
    if limits.auto_truncate:
        max_tokens = min(max_tokens, room)
    if max_tokens > room or (asked is None and room < 1):
        raise ContextTooLong(
            _too_long(prompt_len, asked, where=where, limit=limits.max_model_len),
            param=where,
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, more than max_tokens, which is {max_tokens}",
            param="min_tokens",
            code="integer_above_max_value",
        )
    if max_tokens == asked:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=max_tokens)


def _default_max_tokens(sampling: SamplingParams, room: int, limits: PromptLimits) -> int:
    if limits.max_new_tokens is None:
        return room
    return min(room, max(limits.max_new_tokens, sampling.min_tokens))


def _too_long(prompt_len: int, max_tokens: int | None, *, where: str, limit: int) -> str:
    """Returns the error text. NOTE: clients search for the phrase "maximum context length"."""
    start = f"This model's maximum context length is {limit} tokens. However, "
    if max_tokens is None:
        return (
            f"{start}there are {prompt_len} tokens in the {where}, which leaves no room for an "
            f"answer. Please reduce the length of the {where}."
        )
    return (
        f"{start}you requested {prompt_len + max_tokens} tokens ({prompt_len} in the {where}, "
        f"{max_tokens} in the completion). Please reduce the length of the {where} or completion."
    )
