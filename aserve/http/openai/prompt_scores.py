"""`prompt_logprobs`: how likely each token of a prompt was, in the shape that vLLM gave it.

Must not know endpoints: both have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aserve.errors import InvalidRequest
from aserve.http.openai.schema import ChatBody, CompletionBody
from aserve.messages import PromptToken


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


def prompt_scores(tokens: Sequence[PromptToken], *, num_top: int) -> list[Scores | None]:
    """Nothing predicts the first token."""
    return [None if token.logprob is None else _scores(token, num_top) for token in tokens]


def _scores(token: PromptToken, num_top: int) -> Scores:
    assert token.logprob is not None
    scores = {token.token_id: TokenScore(token.logprob, token.rank, token.token)}
    for rank, other in enumerate(token.top[:num_top], start=1):
        scores.setdefault(other.token_id, TokenScore(other.logprob, rank, other.token))
    return scores
