"""Gathers the choices of an answer that is not streamed from its chunks.

Logprobs are encoded chunk by chunk and kept as JSON, which takes a fraction of the records' memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from aserve.http.errors import RequestFailed
from aserve.http.long_json import JsonList
from aserve.http.openai.answers import ChoiceT, Dialect, Tally, ids_of, logprob_entries
from aserve.http.openai.call import Call
from aserve.http.openai.completion_logprobs import LogprobLists, chunk_logprobs
from aserve.http.openai.parsed import ParsedChoice, ParsedMessage
from aserve.http.openai.prompt_logprobs import prompt_logprobs
from aserve.messages.base import FinishReason
from aserve.messages.output import OutputChunk
from aserve.messages.requests import SamplingParams
from aserve.request_stream import RequestStream


async def whole_answer(request_stream: RequestStream, dialect: Dialect[ChoiceT]) -> Iterator[bytes]:
    """Reads all chunks and returns the pieces of the answer. Raises RequestFailed on an error."""
    tally = Tally(dialect.call)
    choices = [dialect.new_choice(i) for i in range(dialect.call.num_sequences)]
    async for chunk in request_stream:
        if chunk.error is not None:
            raise RequestFailed(chunk.error)
        tally.add(chunk)
        choices[dialect.call.index_of(chunk)].add(chunk)
    return dialect.whole_answer(best_choices(choices, dialect.call), tally.total())


class GatheredChoice:
    """One choice of an answer that is not streamed, without its text and logprobs, which each
    endpoint renders in its own format.
    """

    __slots__ = (
        "_num_scored",
        "_prompt_ids",
        "_token_ids",
        "_total_logprob",
        "finish_reason",
        "stop_reason",
    )

    def __init__(self) -> None:
        self._token_ids = bytearray()
        self._prompt_ids = b""
        self._total_logprob = 0.0
        self._num_scored = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, chunk: OutputChunk) -> None:
        self._token_ids += chunk.token_ids
        self._prompt_ids = self._prompt_ids or chunk.prompt_ids
        self._total_logprob += sum(entry.logprob for entry in chunk.logprobs)
        self._num_scored += len(chunk.logprobs)
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_reason

    @property
    def token_ids(self) -> list[int]:
        return ids_of(bytes(self._token_ids))

    @property
    def prompt_ids(self) -> list[int]:
        return ids_of(self._prompt_ids)

    @property
    def logprob_per_token(self) -> float:
        """The mean logprob, by which best_of ranks. A choice without tokens is the worst."""
        return self._total_logprob / self._num_scored if self._num_scored else -math.inf


class ChatChoice(GatheredChoice):
    """A choice of /v1/chat/completions."""

    __slots__ = ("_parsed", "_sampling", "logprobs", "message", "prompt_logprobs")

    def __init__(self, sampling: SamplingParams, parsed: ParsedChoice) -> None:
        super().__init__()
        self._sampling = sampling
        self._parsed = parsed
        self.message = ParsedMessage()
        self.logprobs = JsonList()
        self.prompt_logprobs = JsonList()

    def add(self, chunk: OutputChunk) -> None:
        super().add(chunk)
        self.message.add(self._parsed.add(chunk))
        self.logprobs.extend(logprob_entries(chunk.logprobs, self._sampling))
        if chunk.prompt is not None and chunk.child == 0:
            self.prompt_logprobs.extend(prompt_logprobs(chunk.prompt, self._sampling))


class TextChoice(GatheredChoice):
    """A choice of /v1/completions."""

    __slots__ = ("_sampling", "_texts", "logprobs", "prompt_logprobs")

    def __init__(self, sampling: SamplingParams) -> None:
        super().__init__()
        self._sampling = sampling
        self._texts: list[str] = []
        top = JsonList() if sampling.logprobs else None
        self.logprobs = LogprobLists(JsonList(), JsonList(), top, JsonList())
        self.prompt_logprobs = JsonList()

    @property
    def text(self) -> str:
        """The choice's text, after the prompt's text if it is echoed."""
        return "".join(self._texts)

    def add(self, chunk: OutputChunk) -> None:
        super().add(chunk)
        if chunk.prompt is not None:
            self._texts.append(chunk.prompt.text)  # the whole prompt comes before the output
        self._texts.append(chunk.text)
        logprobs = chunk_logprobs(chunk, self._sampling)
        if logprobs is not None:
            self.logprobs.extend(logprobs)
        if chunk.prompt is not None:
            self.prompt_logprobs.extend(prompt_logprobs(chunk.prompt, self._sampling))


def best_choices(choices: list[ChoiceT], call: Call) -> list[ChoiceT]:
    """Returns the likeliest `n` choices of each prompt, best first. Without best_of they are all
    choices in their order.
    """
    size, n = call.num_children, call.sampling.n
    if size == n:
        return choices
    best: list[ChoiceT] = []
    for start in range(0, len(choices), size):
        ranked = sorted(choices[start : start + size], key=lambda each: -each.logprob_per_token)
        best += ranked[:n]
    return best
