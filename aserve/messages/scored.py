"""Tokens of prompts and outputs with their log-probabilities, on their way to the client."""

from __future__ import annotations

from collections.abc import Sequence

from aserve.messages.base import Record


class TopLogprob(Record, frozen=True):
    token_id: int
    token: str
    token_bytes: bytes
    logprob: float


class TokenLogprob(Record, frozen=True):
    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    text_offset: int = 0  # characters of the answer's text before this token


class PromptToken(Record, frozen=True):
    """A scored token of the prompt. The first one has neither logprob nor rank."""

    token_id: int
    token: str
    token_bytes: bytes
    text_offset: int  # characters of the prompt's text before this token
    logprob: float | None = None
    rank: int | None = None
    top: tuple[TopLogprob, ...] = ()


class PromptPart(Record, frozen=True):
    """The next tokens of a prompt that is echoed or scored."""

    text: str = ""  # if it is echoed
    tokens: tuple[PromptToken, ...] = ()  # if it is scored


def join_parts(parts: Sequence[PromptPart]) -> PromptPart | None:
    """Joins consecutive parts. Returns None for none."""
    if not parts:
        return None
    return PromptPart(
        text="".join(part.text for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
    )
