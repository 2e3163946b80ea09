"""The order of blocks, as each side of a transfer keeps it.

The KV of a span of tokens comes in one block with all layers, or layer by layer while the step that
computes it still runs. Only the scheduler can say whether such a step counts, and it says so when
the result is there. So the last layer of a span is never sent before that, and a span whose last
layer has come is computed. A step that failed is run again, maybe with other tokens: its spans
begin anew with layer 0, and what came of them counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aserve.disagg.wire import Block, TransferError


@dataclass(slots=True, eq=False)
class Span:
    """Tokens of which the first `num_layers` layers have been sent, or received."""

    tokens: range
    num_layers: int = 0


class SentSpans:
    """The prefill side. `sent_len` tokens have been sent with all layers."""

    __slots__ = ("_part_len", "_streamed", "sent_len", "stop")

    def __init__(self, first: int, stop: int, *, part_len: int) -> None:
        """A block with all layers has at most `part_len` tokens."""
        self.sent_len = first
        self.stop = stop
        self._part_len = part_len
        self._streamed: list[Span] = []  # in order, of steps whose results are not there

    @property
    def is_whole(self) -> bool:
        return self.sent_len == self.stop

    def restart(self, first: int) -> bool:
        """A step is launched next that computes tokens from `first` on. Returns whether all tokens
        before it are computed: none are in flight.
        """
        self._streamed = [span for span in self._streamed if span.tokens.stop <= first]
        return not self._streamed

    def stream(self, first: int, stop: int, *, span_len: int) -> list[Span]:
        """Returns the spans of that step. Whoever sends layers counts them."""
        first, stop = max(first, self.sent_len), min(stop, self.stop)
        end = self._streamed[-1].tokens.stop if self._streamed else self.sent_len
        if first != end:
            return []
        spans = [
            Span(range(start, min(start + span_len, stop)))
            for start in range(first, stop, span_len)
        ]
        self._streamed += spans
        return spans

    def commit(self, num_tokens: int) -> Iterator[Span]:
        """Yields what is left to send of the first `num_tokens` tokens, which are computed."""
        stop = min(num_tokens, self.stop)
        while self.sent_len < stop:
            span = self._next(stop)
            self.sent_len = span.tokens.stop
            yield span

    def _next(self, stop: int) -> Span:
        self._streamed = [span for span in self._streamed if span.tokens.start >= self.sent_len]
        if self._streamed:
            span = self._streamed[0]
            if span.tokens.start == self.sent_len and span.tokens.stop <= stop and span.num_layers:
                return self._streamed.pop(0)
        return Span(range(self.sent_len, min(self.sent_len + self._part_len, stop)))


class ReceivedSpans:
    """The decode side. `done` tokens have come with all layers."""

    __slots__ = ("_layer_bytes", "_open", "done", "stop")

    def __init__(self, first: int, stop: int, layer_bytes: tuple[int, ...]) -> None:
        self.done = first
        self.stop = stop
        self._layer_bytes = layer_bytes
        self._open: list[Span] = []  # in order, one behind the other

    @property
    def is_whole(self) -> bool:
        return self.done == self.stop

    def restart(self) -> None:
        """Another prefill engine goes on where the tokens are not whole."""
        self._open = []

    def check(self, block: Block) -> None:
        """Raises TransferError unless the block may come next."""
        layers = range(block.from_layer, block.from_layer + block.num_layers)
        size = block.num_tokens * sum(self._layer_bytes[layers.start : layers.stop])
        span = self._span_of(block)
        is_in_order = span is not None and layers.start == span.num_layers < layers.stop
        if not is_in_order or layers.stop > len(self._layer_bytes) or block.num_bytes != size:
            stop = block.first + block.num_tokens
            raise TransferError(
                f"a block of tokens {block.first} to {stop}, layers {layers.start} to "
                f"{layers.stop}, with {block.num_bytes} bytes, not the next of {self.done} to "
                f"{self.stop}"
            )

    def note(self, block: Block) -> None:
        """The bytes of a block that was checked are there."""
        span = self._span_of(block)
        assert span is not None
        if not block.from_layer:
            self._open = [each for each in self._open if each.tokens.start < block.first]
            self._open.append(span)
        span.num_layers += block.num_layers
        while self._open and self._open[0].num_layers == len(self._layer_bytes):
            self.done = self._open.pop(0).tokens.stop

    def _span_of(self, block: Block) -> Span | None:
        """Returns the span that a block begins or continues, or None if it can do neither."""
        tokens = range(block.first, block.first + block.num_tokens)
        if block.from_layer:
            return next((span for span in self._open if span.tokens == tokens), None)
        end = self._open[-1].tokens.stop if self._open else self.done
        starts = {end, *(span.tokens.start for span in self._open)}
        is_inside = block.num_tokens > 0 and tokens.stop <= self.stop
        return Span(tokens) if is_inside and block.first in starts else None
