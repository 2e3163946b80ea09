"""Converts the tokens of one sequence to text, ids and logprobs that end at the same token."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection
from typing import TypeAlias

from aserve.messages.base import Record, num_values
from aserve.messages.scored import TokenLogprob
from aserve.text.detokenize import TextStream
from aserve.text.stop import StopMatcher

# A token, the number of characters before its text, and its logprob. PERF: a record takes three
# times as long to make.
PendingToken: TypeAlias = tuple[int, int, TokenLogprob | None]


class Released(Record, frozen=True):
    """The output that became certain since the last call of `take`."""

    text: str
    token_ids: bytes  # int32
    logprobs: tuple[TokenLogprob, ...]


class SequenceText:
    """The output of one sequence. Text that may still become a stop string is held back, with the
    tokens that it belongs to.

    A stop string cuts the text. A token belongs to the answer if its text starts before the cut, so
    usage, logprobs and text end together. Tokens of `end_ids` have no text. A stop string counts
    only if it ends after the first `min_tokens` tokens. With `shows_stop` it stays in the text, so
    nothing is held back.
    """

    __slots__ = (
        "_end_ids",
        "_ids",
        "_is_final",
        "_is_scored",
        "_matcher",
        "_min_tokens",
        "_num_released",
        "_shows_stop",
        "_stream",
        "_text",
        "_tokens",
        "num_kept",
        "num_tokens",
        "stop",
        "text_len",
    )

    def __init__(
        self,
        stream: TextStream,
        *,
        stops: tuple[str, ...] = (),
        end_ids: Collection[int] = (),
        min_tokens: int = 0,
        shows_stop: bool = False,
    ) -> None:
        self._stream = stream
        self._shows_stop = shows_stop
        self._matcher = StopMatcher(stops) if stops else None
        self._end_ids = end_ids
        self._min_tokens = min_tokens
        self._is_final = False
        self._is_scored = False  # some tokens have logprobs
        self._num_released = 0  # characters
        self._text = ""  # not yet released
        # Tokens that are not released, int32, which no stop string can cut: none is asked for, or
        # was when they came.
        self._ids = b""
        # Those behind them. PERF: a list, because an empty deque has 760 bytes, and thousands of
        # requests may wait.
        self._tokens: list[PendingToken] = []
        self.num_kept = 0
        self.num_tokens = 0
        self.stop: str | None = None
        self.text_len = 0

    def feed_all(self, token_ids: bytes) -> None:
        """Adds tokens without logprobs, up to a stop string. token_ids: int32."""
        if self._matcher is None and not self._tokens:
            self._feed_plain(token_ids)
            return
        for token_id in array("i", token_ids):
            self.feed(token_id)
            if self.stop is not None:
                return

    def _feed_plain(self, token_ids: bytes) -> None:
        """PERF: most sequences have no stop strings, and so no tokens to hold back."""
        assert not self._is_final, "a token after the end of its sequence"
        ids, end_ids, stream = array("i", token_ids), self._end_ids, self._stream
        self._ids += token_ids
        self.num_tokens += len(ids)
        text = "".join([stream.feed(token_id) for token_id in ids if token_id not in end_ids])
        self._text += text
        self.text_len += len(text)

    def feed(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        assert not self._is_final, "a token after the end of its sequence"
        self._tokens.append((token_id, self.text_len, logprob))
        self._is_scored |= logprob is not None
        self.num_tokens += 1
        if token_id not in self._end_ids:
            self._extend(self._stream.feed(token_id))

    def add_stops(self, stops: tuple[str, ...]) -> None:
        """Adds stop strings, which count if they begin in the text from here on."""
        if stops and self._matcher is None:
            self._matcher = StopMatcher(stops, num_seen=self.text_len)
        elif self._matcher is not None:
            self._matcher.add(stops)

    def finish(self) -> None:
        """Marks the end of the sequence. Nothing is held back from now on."""
        if not self._is_final:
            self._extend(self._stream.finish())
            self._is_final = True

    def take(self) -> Released:
        """Returns the output that became certain since the last call."""
        certain_len, token_ids, ready = self.text_len, self._ids, self._tokens
        if self._matcher is None or self._is_final or self._shows_stop:
            self._tokens = []
        else:
            certain_len -= self._matcher.num_held
            ready = self._ready_tokens(certain_len)
        num_certain = certain_len - self._num_released
        text, self._text = self._text[:num_certain], self._text[num_certain:]
        self._ids, self._num_released = b"", certain_len
        logprobs: tuple[TokenLogprob, ...] = ()
        if ready:
            token_ids += array("i", [token_id for token_id, _, _ in ready]).tobytes()
            if self._is_scored:
                logprobs = tuple([each for _, _, each in ready if each is not None])
        self.num_kept += num_values(token_ids)
        return Released(text, token_ids, logprobs)

    def _extend(self, text: str) -> None:
        self._text += text
        self.text_len += len(text)
        if self._matcher is None:
            return
        hit = self._matcher.feed(text, is_armed=self.num_tokens > self._min_tokens)
        if hit is not None:
            self._cut(hit.end if self._shows_stop else hit.start)
            self.stop = hit.stop

    def _cut(self, end: int) -> None:
        self.text_len = end
        while self._tokens and self._tokens[-1][1] >= end:
            self._tokens.pop()
        self._is_final = True

    def _ready_tokens(self, certain_len: int) -> list[PendingToken]:
        """Removes and returns the tokens whose text begins in the certain one."""
        starts = (start for _, start, _ in self._tokens)
        num_ready = sum(1 for _ in itertools.takewhile(certain_len.__gt__, starts))
        ready = self._tokens[:num_ready]
        del self._tokens[:num_ready]
        return ready
