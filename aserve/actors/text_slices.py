"""Sorts the detokenizer's messages by request, and cuts them into slices of a bounded time.

Requests do not depend on each other, and within one the order stays. So whatever came for a request
since its last turn makes one chunk: a host that is slower than the device sends longer chunks, and
fewer. Between two slices other work has its turn, above all the scheduler, for which the device
may wait.

A step may bring the scores of 8,192 prompt tokens with 20 alternatives each, whose text takes a
third of a second. They are split between tokens, so that a slice looks like the result of a
smaller step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from aserve.channel import Channel, yield_to_loop
from aserve.messages.base import VALUE_BYTES, num_values
from aserve.messages.changes import Amended
from aserve.messages.output import (
    DetokenizerEvent,
    NextTokens,
    Refused,
    Retired,
    SequenceOutput,
    StepOutput,
)
from aserve.messages.requests import OpenText
from aserve.messages.results import PromptLogprobs

MAX_SCORES = 4096  # of a slice, alternatives included; their text takes about 5 ms
BUSY_SCORES = MAX_SCORES // 4  # of a slice while further messages wait
CHUNK_SCORES = 128  # scores whose text takes as long as a chunk and its way to the client
# From the result of a step to the launch of the next, the loop goes round three times: for the
# callback, the pump and the scheduler. Each turn of `yield_to_loop` is two rounds.
LAUNCH_TURNS = 2

TextEvent: TypeAlias = SequenceOutput | OpenText | Retired | Refused | Amended


class Part(NamedTuple):
    """Messages about one request, in order. `is_plain` is set if all are outputs."""

    request_id: str
    events: list[TextEvent]
    is_plain: bool = False


async def sliced(
    inbox: Channel[DetokenizerEvent], num_children: Callable[[str], int]
) -> AsyncIterator[list[Part]]:
    """Yields the batches of the inbox in slices. Between two of them a result that has come can
    launch its next step. Slices are shorter while further messages wait, because then the host is
    slower than the device.
    """
    async for events in inbox.batches():
        parts = slices(events, num_children, lambda: BUSY_SCORES if inbox else MAX_SCORES)
        for number, part in enumerate(parts):
            if number:
                await yield_to_loop(LAUNCH_TURNS)
            yield part


def slices(
    events: Sequence[DetokenizerEvent],
    num_children: Callable[[str], int],
    max_scores: Callable[[], int] = lambda: MAX_SCORES,
) -> Iterator[list[Part]]:
    """Yields the same events by request, in lists that cost at most `max_scores` or one token.

    `num_children` returns that number for an open request; each child repeats the prompt's scores.
    """
    current: list[Part] = []
    room = max_scores()
    for part, size in _parts_of(events, num_children):
        if current and size > room:
            yield current
            current, room = [], max_scores()
        if current and current[-1].request_id == part.request_id:
            current[-1].events.extend(part.events)
        else:
            current.append(part)
        room -= size
    if current:
        yield current


def num_scores(events: Sequence[TextEvent], *, num_children: int) -> int:
    """Returns the number of scores whose text is made for these messages."""
    size = 0
    for event in events:
        if isinstance(event, SequenceOutput) and (event.logprobs or event.prompt_logprobs):
            size += _size_of(event, num_children)
    return size


def _parts_of(
    events: Sequence[DetokenizerEvent], num_children: Callable[[str], int]
) -> Iterator[tuple[Part, int]]:
    """Yields the messages of each request with their cost in scores. Those that cost more than a
    slice are split.
    """
    found: defaultdict[str, list[TextEvent]] = defaultdict(list)
    mixed: set[str] = set()  # requests with other messages than outputs
    for event in _joined(events):
        if isinstance(event, SequenceOutput):
            found[event.request_id].append(event)
        else:
            request_id = event.amend.request_id if isinstance(event, Amended) else event.request_id
            found[request_id].append(event)
            mixed.add(request_id)
    for request_id, own in found.items():
        part = Part(request_id, own, request_id not in mixed)
        if len(own) == 1 and not num_scores(own, num_children=1):
            yield part, CHUNK_SCORES  # PERF: nearly all
        else:
            yield from _split(part, num_children)


def _joined(events: Sequence[DetokenizerEvent]) -> Iterator[TextEvent]:
    """Yields the events one by one. Where steps brought the next tokens of the same sequences, one
    after the other, these are one output of each sequence.
    """
    steps: list[NextTokens] = []
    for event in events:
        tokens = event.next_tokens if isinstance(event, StepOutput) else None
        if steps and not (tokens is not None and tokens.is_of(steps[0])):
            yield from steps[0].outputs(*steps[1:])
            steps.clear()
        if tokens is not None:
            steps.append(tokens)
        if isinstance(event, StepOutput):
            yield from event.sequences
        else:
            yield event
    if steps:
        yield from steps[0].outputs(*steps[1:])


def _split(part: Part, num_children: Callable[[str], int]) -> Iterator[tuple[Part, int]]:
    request_id, events = part.request_id, part.events
    n = events[0].sampling.n if isinstance(events[0], OpenText) else num_children(request_id)
    size = _cost_of(events, n)
    if size <= MAX_SCORES:
        yield part, size
        return
    for event in events:
        for cut in _cut(event, n) if isinstance(event, SequenceOutput) else (event,):
            yield Part(request_id, [cut]), _cost_of([cut], n)


def _cost_of(events: list[TextEvent], num_children: int) -> int:
    num_chunks = min(len(events), num_children)
    return CHUNK_SCORES * num_chunks + num_scores(events, num_children=num_children)


def _size_of(output: SequenceOutput, num_children: int) -> int:
    size = sum(len(run.chosen) + len(run.top_ids) for run in output.logprobs)
    scores = output.prompt_logprobs
    if scores is not None:
        size += (len(scores.chosen) + len(scores.top_ids)) * num_children
    return size // VALUE_BYTES


def _cut(output: SequenceOutput, num_children: int) -> Iterator[SequenceOutput]:
    """Splits the prompt's scores. The last part has the rest of the output."""
    scores = output.prompt_logprobs
    if scores is None:
        yield output
        return
    num_tokens = num_values(scores.chosen)
    width = (1 + len(scores.top_ids) // len(scores.chosen)) * num_children
    step = max(1, (MAX_SCORES - CHUNK_SCORES) // width)
    for start in range(0, num_tokens, step):
        run = _run_of(scores, start, min(start + step, num_tokens))
        if start + step < num_tokens:
            yield SequenceOutput(
                output.request_id,
                output.child,
                output.position,
                b"",
                cached_len=output.cached_len,
                prompt_logprobs=run,
            )
        else:
            yield msgspec.structs.replace(output, prompt_logprobs=run)


def _run_of(scores: PromptLogprobs, start: int, end: int) -> PromptLogprobs:
    width = len(scores.top_ids) // len(scores.chosen)
    tokens, tops = slice(4 * start, 4 * end), slice(4 * start * width, 4 * end * width)
    return PromptLogprobs(
        row=scores.row,
        position=scores.position + start,
        chosen=scores.chosen[tokens],
        ranks=scores.ranks[tokens],
        top_ids=scores.top_ids[tops],
        top_logprobs=scores.top_logprobs[tops],
    )
