"""The records of answers that both endpoints share: usage, and what a choice has gathered so far.

Must not know which endpoint renders them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from aserve.http.openai.call import Call
from aserve.messages import OutputChunk, TokenLogprob, Usage


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


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
    """All of one choice, for an answer that is not streamed."""

    def __init__(self, chunks: Iterable[OutputChunk]) -> None:
        parts = list(chunks)
        self.text = "".join(part.text for part in parts)
        self.logprobs: list[TokenLogprob] = [entry for part in parts for entry in part.logprobs]
        self.finish_reason = parts[-1].finish_reason
        self.stop_reason = parts[-1].stop_reason


class Dialect(Protocol):
    """How one endpoint writes its answers; every method returns JSON."""

    call: Call

    def opening(self, index: int) -> bytes | None:
        """The event before a choice's first text, if there is one."""

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        """What a chunk adds to a choice; None when a client would see nothing of it."""

    def usage(self, usage: UsageBody) -> bytes:
        """The event with usage and no choices."""

    def whole(self, choices: list[Choice], usage: UsageBody) -> bytes:
        """The answer that is not streamed."""
