"""Renders log-probabilities for /v1/completions: parallel lists with one entry per token."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aserve.http.long_json import JsonList
from aserve.http.openai.answers import spelled
from aserve.messages.output import OutputChunk
from aserve.messages.requests import SamplingParams
from aserve.messages.scored import PromptToken, TokenLogprob


class Logprobs(msgspec.Struct):
    """Parallel lists with one entry per token. The first token of a prompt has null, because
    nothing predicts it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class LogprobLists(msgspec.Struct):
    """The `Logprobs` of a whole choice, kept as JSON while it grows."""

    tokens: JsonList
    token_logprobs: JsonList
    top_logprobs: JsonList | None
    text_offset: JsonList

    def extend(self, part: Logprobs) -> None:
        self.tokens.extend(part.tokens)
        self.token_logprobs.extend(part.token_logprobs)
        if self.top_logprobs is not None:
            self.top_logprobs.extend(part.top_logprobs or ())
        self.text_offset.extend(part.text_offset)


def chunk_logprobs(chunk: OutputChunk, sampling: SamplingParams) -> Logprobs | None:
    """Returns the logprobs of a chunk's tokens, after those of the prompt if it is echoed."""
    if sampling.logprobs is None:
        return None
    echoed = chunk.prompt.tokens if sampling.echo and chunk.prompt is not None else ()
    entries: list[TokenLogprob | PromptToken] = [*spelled(echoed, sampling)]
    entries += spelled(chunk.logprobs, sampling)
    return logprobs_of(entries, num_top=sampling.logprobs)


def logprobs_of(entries: Sequence[TokenLogprob | PromptToken], *, num_top: int) -> Logprobs:
    return Logprobs(
        tokens=[spell(entry.token, entry.token_bytes) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[top_of(entry, num_top=num_top) for entry in entries] if num_top else None,
        text_offset=[entry.text_offset for entry in entries],
    )


def top_of(entry: TokenLogprob | PromptToken, *, num_top: int) -> dict[str, float] | None:
    """Returns the likeliest tokens, best first. The chosen token is always included, if need be at
    the end.
    """
    if entry.logprob is None:
        return None
    best = entry.top[:num_top]
    top = {spell(other.token, other.token_bytes): other.logprob for other in best}
    top.setdefault(spell(entry.token, entry.token_bytes), entry.logprob)
    return top


def spell(token: str, token_bytes: bytes) -> str:
    """Spells a token that is not whole characters as its bytes, as OpenAI does."""
    if token.encode() == token_bytes:
        return token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
