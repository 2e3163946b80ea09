"""The records and protocols that the answers of several endpoints share: usage and logprobs, and
`Dialect`, which renders the JSON of one endpoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from aserve.http.openai.call import Call
from aserve.messages.base import FinishReason
from aserve.messages.output import OutputChunk, Usage
from aserve.messages.requests import SamplingParams
from aserve.messages.scored import PromptToken, TokenLogprob, TopLogprob


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """The tokens of the reasoning, and of a prediction those that the output has and has not."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    timings: msgspec.Raw | UnsetType = UNSET


class TopEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopEntry]


Named = TypeVar("Named", TokenLogprob, PromptToken, TopLogprob)
Scored = TypeVar("Scored", TokenLogprob, PromptToken)


def logprob_entries(
    entries: Iterable[TokenLogprob], sampling: SamplingParams | None = None
) -> list[LogprobEntry]:
    return [
        LogprobEntry(
            entry.token, entry.logprob, list(entry.token_bytes), [*map(_top_entry, entry.top)]
        )
        for entry in spelled(entries, sampling)
    ]


def spelled(entries: Iterable[Scored], sampling: SamplingParams | None) -> Iterable[Scored]:
    """Returns the entries with the tokens that the request asks for: their texts, or their ids."""
    if sampling is None or not sampling.tokens_as_ids:
        return entries
    return [
        msgspec.structs.replace(_by_id(entry), top=tuple(map(_by_id, entry.top)))
        for entry in entries
    ]


def _by_id(entry: Named) -> Named:
    name = f"token_id:{entry.token_id}"
    return msgspec.structs.replace(entry, token=name, token_bytes=name.encode())


def _top_entry(entry: TopLogprob) -> TopEntry:
    return TopEntry(entry.token, entry.logprob, list(entry.token_bytes))


TEXT = "\0"  # stands for the text in the JSON of a sample


class EventTemplate:
    """The JSON of an event whose only part that differs within its stream is a text.

    `sample` is such an event with TEXT for the text, after which no field has a value of the
    client's. PERF: all but the text is encoded once.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, sample: bytes) -> None:
        self._before, _, self._after = sample.rpartition(msgspec.json.encode(TEXT))

    def of(self, text: str) -> bytes:
        return self._before + msgspec.json.encode(text) + self._after


class PlainEvents:
    """The events of a call's choices that show a text alone, made by a template for each choice.
    `sample_of` makes the event of a choice whose text is TEXT.
    """

    __slots__ = ("_is_plain", "_sample_of", "_templates")

    def __init__(self, call: Call, sample_of: Callable[[int], bytes]) -> None:
        shows_more = call.sampling.logprobs is not None or call.sampling.return_token_ids
        self._is_plain = not (shows_more or call.reports_each_usage)
        self._sample_of = sample_of
        self._templates: dict[int, EventTemplate] = {}

    def have(self, chunk: OutputChunk) -> bool:
        """Whether a chunk shows nothing but text."""
        return self._is_plain and chunk.finish_reason is None and chunk.prompt is None

    def of(self, index: int, text: str) -> bytes:
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = EventTemplate(self._sample_of(index))
        return template.of(text)


class Tally:
    """The usage of a call. Each prompt counts once, and each output counts. The timings are those
    of the first prompt.
    """

    def __init__(self, call: Call) -> None:
        self._is_predicted = any(request.prediction for request in call.requests)
        self._timings = b""
        self._last: dict[tuple[str, int], Usage] = {}

    def add(self, chunk: OutputChunk) -> None:
        self._last[chunk.request_id, chunk.child] = chunk.usage
        if chunk.timings and chunk.request_id.endswith("-0"):
            self._timings = chunk.timings

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
            completion_tokens_details=self._prediction() if self._is_predicted else UNSET,
            timings=msgspec.Raw(self._timings) if self._timings else UNSET,
        )

    def _prediction(self) -> CompletionDetails:
        accepted = sum(sum(usage.accepted_drafts) for usage in self._last.values())
        drafts = sum(usage.draft_tokens for usage in self._last.values())
        return CompletionDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafts - accepted
        )


class Choice(Protocol):
    """Gathers one choice of an answer that is not streamed. It has token ids if the call returns
    them.
    """

    finish_reason: FinishReason | None

    @property
    def logprob_per_token(self) -> float: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def prompt_ids(self) -> list[int]: ...

    def add(self, chunk: OutputChunk) -> None: ...


ChoiceT = TypeVar("ChoiceT", bound=Choice)


def ids_of(data: bytes) -> list[int]:
    """Converts int32 bytes to a list. PERF: chunks carry bytes, because few clients want ids, and
    numpy takes six times as long for so few of them.
    """
    return array("i", data).tolist()


def is_visible(chunk: OutputChunk, call: Call) -> bool:
    """Returns whether the chunk changes anything in the answer."""
    shows_ids = call.sampling.return_token_ids and bool(chunk.token_ids or chunk.prompt_ids)
    shows_text = bool(chunk.text or chunk.logprobs) or chunk.prompt is not None
    return shows_text or shows_ids or chunk.finish_reason is not None


class Dialect(Protocol[ChoiceT]):
    """Renders the answers of one endpoint: each event as JSON, or the whole answer in pieces.

    `usage` is the usage so far, or None if events do not report it.
    """

    call: Call

    def opening(self, index: int, usage: UsageBody | None) -> bytes | None:
        """Returns the event before a choice's first text, or None if the endpoint has none."""

    def deltas(self, index: int, chunk: OutputChunk, usage: UsageBody | None) -> Iterable[bytes]:
        """Yields the events of a chunk, none if the client would see nothing of it."""

    def usage(self, usage: UsageBody) -> bytes:
        """Returns the event with usage and no choices."""

    def new_choice(self, index: int) -> ChoiceT:
        """Returns an empty choice of an answer that is not streamed."""

    def whole_answer(self, choices: list[ChoiceT], usage: UsageBody) -> Iterator[bytes]:
        """Yields the pieces of an answer that is not streamed."""
