"""Renders `prompt_logprobs` in vLLM's format: the log-probability of each prompt token."""

from __future__ import annotations

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.schema import ChatBody, CompletionBody
from aserve.messages.output import PromptPart, PromptToken
from aserve.messages.requests import SamplingParams


class TokenScore(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


Scores = dict[int, TokenScore]  # by token id: the prompt's own token, then the likeliest ones


def check_prompt_logprobs(body: CompletionBody | ChatBody) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "Invalid 'prompt_logprobs': they are not streamed. Ask without 'stream', or for 'echo' "
            "with 'logprobs' in /v1/completions.",
            param="prompt_logprobs",
            code="invalid_value",
        )


def prompt_scores(prompt: PromptPart, sampling: SamplingParams) -> list[Scores | None]:
    """As many as were asked for, of this part of the prompt. Nothing predicts the first token."""
    num_top = sampling.prompt_logprobs
    if num_top is None:
        return []
    return [None if token.logprob is None else _scores(token, num_top) for token in prompt.tokens]


def _scores(token: PromptToken, num_top: int) -> Scores:
    assert token.logprob is not None
    scores = {token.token_id: TokenScore(token.logprob, token.rank, token.token)}
    for rank, other in enumerate(token.top[:num_top], start=1):
        scores.setdefault(other.token_id, TokenScore(other.logprob, rank, other.token))
    return scores
