"""Converts the device's log-probabilities to the records that clients read, with token texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from aserve.messages.base import array_f32, array_i32
from aserve.messages.output import SequenceOutput
from aserve.messages.scored import TokenLogprob, TopLogprob
from aserve.text.tokenizer import TextTokenizer


class ScoredToken(NamedTuple):
    """A sampled token with its log-probability and the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...]


def scored_tokens(
    output: SequenceOutput, num_top: int, tokenizer: TextTokenizer
) -> Iterator[ScoredToken]:
    """Yields one entry per token of the output."""
    token_ids = iter(array_i32(output.token_ids).tolist())
    for run in output.logprobs:
        chosen = array_f32(run.chosen).tolist()
        tops = alternatives(
            run.top_ids,
            run.top_logprobs,
            num_tokens=len(chosen),
            num_top=num_top,
            tokenizer=tokenizer,
        )
        for logprob, top in zip(chosen, tops, strict=True):
            yield ScoredToken(next(token_ids), logprob, top)


def token_logprob(
    scored: ScoredToken | None, text_offset: int, tokenizer: TextTokenizer
) -> TokenLogprob | None:
    if scored is None:
        return None
    token_bytes = tokenizer.token_bytes(scored.token_id)
    return TokenLogprob(
        token_id=scored.token_id,
        token=display_text(token_bytes),
        token_bytes=token_bytes,
        logprob=scored.logprob,
        top=scored.top,
        text_offset=text_offset,
    )


def display_text(token_bytes: bytes) -> str:
    return token_bytes.decode("utf-8", "replace")


def alternatives(
    top_ids: bytes, top_logprobs: bytes, *, num_tokens: int, num_top: int, tokenizer: TextTokenizer
) -> Iterator[tuple[TopLogprob, ...]]:
    """Yields the best alternatives of each token. `top_ids` is int32 and `top_logprobs` float32,
    both [num_tokens, at least num_top] and best first. Tokens that cannot be sampled, such as those
    that a grammar forbids, are no alternatives: of equal scores of -inf, any could be the best.
    """
    ids = array_i32(top_ids).reshape(num_tokens, -1)[:, :num_top].tolist()
    logprobs = array_f32(top_logprobs).reshape(num_tokens, -1)[:, :num_top].tolist()
    for own_ids, own_logprobs in zip(ids, logprobs, strict=True):
        yield tuple(
            alternative(token_id, logprob, tokenizer)
            for token_id, logprob in zip(own_ids, own_logprobs, strict=True)
            if logprob > -math.inf
        )


def alternative(token_id: int, logprob: float, tokenizer: TextTokenizer) -> TopLogprob:
    token_bytes = tokenizer.token_bytes(token_id)
    return TopLogprob(token_id, display_text(token_bytes), token_bytes, logprob)
