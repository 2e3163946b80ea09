"""The records that the answers of several endpoints share: usage, logprobs and gathered choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import msgspec

from aserve.http.openai.call import Call
from aserve.messages.base import array_i32
from aserve.messages.output import OutputChunk, TokenLogprob, TopLogprob, Usage


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


class Gatherer(Protocol):
    """A dialect's choice, as it grows."""

    @property
    def logprob_per_token(self) -> float: ...

    def add(self, chunk: OutputChunk) -> None: ...


GathererT = TypeVar("GathererT", bound=Gatherer)


def ids_of(data: bytes) -> list[int]:
    """PERF: few clients ask for ids, and every chunk of every stream has some."""
    ids: list[int] = array_i32(data).tolist()
    return ids


def is_visible(chunk: OutputChunk, call: Call) -> bool:
    """Whether a client would see anything of it."""
    shows_ids = call.sampling.return_token_ids and bool(chunk.token_ids or chunk.prompt_ids)
    shows_text = bool(chunk.text or chunk.logprobs) or chunk.prompt is not None
    return shows_text or shows_ids or chunk.finish_reason is not None


class Dialect(Protocol[GathererT]):
    """How one endpoint writes its answers: events as JSON, a whole answer as pieces of it.

    An event's `usage` is that so far, if each one is to say it.
    """

    call: Call

    def opening(self, index: int, usage: UsageBody | None) -> bytes | None:
        """The event before a choice's first text, if there is one."""

    def delta(self, index: int, chunk: OutputChunk, usage: UsageBody | None) -> bytes | None:
        """What a chunk adds to a choice; None when a client would see nothing of it."""

    def usage(self, usage: UsageBody) -> bytes:
        """The event with usage and no choices."""

    def gather(self) -> GathererT:
        """A choice of an answer that is not streamed, before anything came."""

    def whole(self, choices: list[GathererT], usage: UsageBody) -> Iterator[bytes]:
        """The answer that is not streamed."""
