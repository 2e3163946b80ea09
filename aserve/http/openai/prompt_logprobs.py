"""Renders `prompt_logprobs` in vLLM's format: the log-probability of each prompt token."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.schema import ChatBody, CompletionBody
from aserve.messages.requests import SamplingParams
from aserve.messages.scored import PromptPart, PromptToken


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


# By token id: the prompt's own token, then the likeliest ones.
PromptLogprobs: TypeAlias = dict[int, PromptLogprob]


def check_prompt_logprobs(body: CompletionBody | ChatBody) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "Invalid 'prompt_logprobs': they are not streamed. Send the request without 'stream', "
            "or use 'echo' with 'logprobs' in /v1/completions.",
            param="prompt_logprobs",
            code="invalid_value",
        )


def prompt_logprobs(prompt: PromptPart, sampling: SamplingParams) -> list[PromptLogprobs | None]:
    """Returns the entries of one part of the prompt. The prompt's first token has None, because
    nothing predicts it.
    """
    num_top = sampling.prompt_logprobs
    if num_top is None:
        return []
    return [None if token.logprob is None else _entry(token, num_top) for token in prompt.tokens]


def _entry(token: PromptToken, num_top: int) -> PromptLogprobs:
    assert token.logprob is not None
    entry = {token.token_id: PromptLogprob(token.logprob, token.rank, token.token)}
    for rank, other in enumerate(token.top[:num_top], start=1):
        entry.setdefault(other.token_id, PromptLogprob(other.logprob, rank, other.token))
    return entry
