"""A buffer of unread output chunks, which coalesces them and counts their bytes, and the alarm of a
reader for whom none comes. One RequestStream writes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from aserve.messages.base import ChildKey, Record
from aserve.messages.output import OutputChunk
from aserve.messages.scored import PromptToken, TokenLogprob, join_parts

MAX_UNREAD_BYTES = 16 << 20
OF_ALL = -1  # child number of an error
# The size of a batch, which is written in one short iteration of the loop. NOTE: it is more than
# the detokenizer makes in one iteration, so a reader that does not wait for a client never falls
# behind.
BATCH_BYTES = 1 << 20
# Sizes of records in memory, measured with sys.getsizeof over all their parts.
CHUNK_BYTES = 400
SCORE_BYTES = 280  # a token with its log-probability
ALTERNATIVE_BYTES = 180


class UnreadAnswer(ConnectionError):
    """Too many bytes of an answer were unread, so its requests were cancelled."""


class Sized(Record, frozen=True):
    """A chunk and its approximate size in memory."""

    size_bytes: int
    chunk: OutputChunk


class Unread:
    __slots__ = ("_queues", "size_bytes")

    def __init__(self) -> None:
        self._queues: dict[ChildKey, deque[Sized]] = {}
        self.size_bytes = 0  # approximate size in memory of all chunks

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def num_chunks(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, chunk: OutputChunk) -> None:
        # An error is about all sequences of its request, so it does not become one with the text
        # of the sequence that it names.
        child = chunk.child if chunk.error is None else OF_ALL
        key, sized = (chunk.request_id, child), Sized(size_of(chunk), chunk)
        queue = self._queues.get(key)
        if queue is None:
            self._queues[key] = deque((sized,))
        else:
            queue.append(sized)
            self.size_bytes -= coalesce(queue)
        self.size_bytes += sized.size_bytes

    def take(self) -> list[OutputChunk]:
        """Removes and returns about BATCH_BYTES, one chunk per child. Children that have ended come
        last, because the end of a request must come after all its chunks.
        """
        batch: list[OutputChunk] = []
        room = BATCH_BYTES
        queues = [*self._queues.items()]
        if len(queues) > 1:
            queues.sort(key=_is_ended)
        for key, queue in queues:
            taken: list[OutputChunk] = []
            while queue and room > 0:
                sized = queue.popleft()
                room -= sized.size_bytes
                self.size_bytes -= sized.size_bytes
                taken.append(sized.chunk)
            if not queue:
                del self._queues[key]
            if taken:
                batch.append(merge(taken))
            if room <= 0:
                break
        return batch


class IdleAlarm:
    """Calls `wake` when `idle_s` have passed since the last `reset` or call.

    PERF: it has one timer, which looks at the time when it fires. A timer for each wait took 7 % of
    the CPU time of a streamed token.
    """

    __slots__ = ("_idle_s", "_loop", "_since_s", "_timer", "_wake")

    def __init__(self, idle_s: float, wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._wake = wake
        self._since_s = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._look)

    def reset(self) -> None:
        self._since_s = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._since_s + self._idle_s - self._loop.time()
        if left_s <= 0:
            self._wake()
            self.reset()
            left_s = self._idle_s
        self._timer = self._loop.call_later(left_s, self._look)


def _is_ended(item: tuple[ChildKey, deque[Sized]]) -> bool:
    return item[1][-1].chunk.is_last


def size_of(chunk: OutputChunk) -> int:
    """Returns the approximate size of a chunk in memory."""
    size = CHUNK_BYTES + len(chunk.text) + len(chunk.token_ids) + len(chunk.prompt_ids)
    size += len(chunk.embedding)
    if chunk.logprobs:
        size += sum(map(_size_of_score, chunk.logprobs))
    if chunk.prompt is not None:
        size += len(chunk.prompt.text) + sum(map(_size_of_score, chunk.prompt.tokens))
    return size


def _size_of_score(token: TokenLogprob | PromptToken) -> int:
    return SCORE_BYTES + ALTERNATIVE_BYTES * len(token.top)


def coalesce(queue: deque[Sized]) -> int:
    """Merges the last chunks of one child and returns how many bytes that saves.

    PERF: only chunks of similar size are merged, so each byte is copied O(log n) times and the
    queue stays short. No merged chunk is larger than a batch.
    """
    saved = 0
    while len(queue) > 1:
        before, last = queue[-2], queue[-1]
        size_bytes = before.size_bytes + last.size_bytes
        if before.size_bytes > 2 * last.size_bytes or size_bytes > BATCH_BYTES:
            break
        queue.pop()
        queue[-1] = Sized(size_bytes - CHUNK_BYTES, merge([before.chunk, last.chunk]))
        saved += CHUNK_BYTES
    return saved


def merge(chunks: list[OutputChunk]) -> OutputChunk:
    """Joins consecutive chunks of one child into one."""
    if len(chunks) == 1:
        return chunks[0]
    return msgspec.structs.replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=b"".join(chunk.token_ids for chunk in chunks),
        prompt_ids=chunks[0].prompt_ids,
        prompt_tail=chunks[0].prompt_tail,
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        prompt=join_parts([chunk.prompt for chunk in chunks if chunk.prompt is not None]),
    )
