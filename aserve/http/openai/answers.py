"""The records of answers that endpoints share: usage, logprobs, what a choice has gathered so far.

Must not know which endpoint renders them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import msgspec

from aserve.http.openai.call import Call
from aserve.messages import OutputChunk, PromptPart, TokenLogprob, TopLogprob, Usage, array_i32
from aserve.outlet import merge


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopEntry]


def logprob_entries(entries: Iterable[TokenLogprob]) -> list[LogprobEntry]:
    return [
        LogprobEntry(
            entry.token, entry.logprob, list(entry.token_bytes), [*map(_top_entry, entry.top)]
        )
        for entry in entries
    ]


def _top_entry(entry: TopLogprob) -> TopEntry:
    return TopEntry(entry.token, entry.logprob, list(entry.token_bytes))


class Tally:
    """Usage of a call: its prompts once each, the outputs of all children."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], Usage] = {}

    def add(self, chunk: OutputChunk) -> None:
        self._last[chunk.request_id, chunk.child] = chunk.usage

    def total(self) -> UsageBody:
        prompts: dict[str, Usage] = {}
        for (request_id, child), usage in self._last.items():
            if child == 0 or request_id not in prompts:
                prompts[request_id] = usage
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts.values())
        completion_tokens = sum(usage.completion_tokens for usage in self._last.values())
        cached_tokens = sum(usage.cached_tokens for usage in prompts.values())
        return UsageBody(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens),
        )


class Choice:
    """What the chunks of one choice say together: all of it, or one event's part."""

    def __init__(self, chunks: list[OutputChunk]) -> None:
        self._whole = whole = merge(chunks)
        self.prompt = whole.prompt or PromptPart()
        self.text = whole.text
        self.logprobs = whole.logprobs
        self.finish_reason = whole.finish_reason
        self.stop_reason = whole.stop_reason

    @property
    def token_ids(self) -> list[int]:
        """PERF: few clients ask for ids, and every chunk of every stream is a choice's part."""
        token_ids: list[int] = array_i32(self._whole.token_ids).tolist()
        return token_ids

    @property
    def prompt_ids(self) -> list[int]:
        prompt_ids: list[int] = array_i32(self._whole.prompt_ids).tolist()
        return prompt_ids

    @property
    def logprob_per_token(self) -> float:
        """Of nothing at all it is the worst."""
        total = sum(entry.logprob for entry in self.logprobs)
        return total / len(self.logprobs) if self.logprobs else -math.inf


def best_choices(choices: list[Choice], call: Call) -> list[Choice]:
    """The likeliest `n` of each prompt, best first; all in their order if no more were made."""
    size, n = call.num_children, call.sampling.n
    if size == n:
        return choices
    best: list[Choice] = []
    for start in range(0, len(choices), size):
        ranked = sorted(choices[start : start + size], key=lambda each: -each.logprob_per_token)
        best += ranked[:n]
    return best


def is_visible(chunk: OutputChunk, call: Call) -> bool:
    """Whether a client would see anything of it."""
    shows_ids = call.sampling.return_token_ids and bool(chunk.token_ids or chunk.prompt_ids)
    shows_text = bool(chunk.text or chunk.logprobs) or chunk.prompt is not None
    return shows_text or shows_ids or chunk.finish_reason is not None


class Dialect(Protocol):
    """How one endpoint writes its answers; every method returns JSON.

    An event's `usage` is that so far, if each one is to say it.
    """

    call: Call

    def opening(self, index: int, usage: UsageBody | None) -> bytes | None:
        """The event before a choice's first text, if there is one."""

    def delta(self, index: int, chunk: OutputChunk, usage: UsageBody | None) -> bytes | None:
        """What a chunk adds to a choice; None when a client would see nothing of it."""

    def usage(self, usage: UsageBody) -> bytes:
        """The event with usage and no choices."""

    def whole(self, choices: list[Choice], usage: UsageBody) -> bytes:
        """The answer that is not streamed."""
