"""Splits logprobs into slices, which bounds the work of the detokenizer per loop iteration.

A step may bring the scores of 8,192 prompt tokens with 20 alternatives each, whose text takes a
third of a second. They are split between tokens, so that a slice looks like the result of a
smaller step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec

from aserve.channel import Channel, yield_to_loop
from aserve.messages.base import VALUE_BYTES, num_values
from aserve.messages.output import DetokenizerEvent, SequenceOutput, StepOutput
from aserve.messages.requests import OpenText
from aserve.messages.results import PromptLogprobs

MAX_SCORES = 4096  # alternatives included; their text takes about 5 ms


def slices(
    events: Sequence[DetokenizerEvent], num_children: Callable[[str], int]
) -> Iterator[list[DetokenizerEvent]]:
    """Yields the same events in order, in lists of at most MAX_SCORES scores or one token.

    `num_children` returns that number for an open request; each child repeats the prompt's scores.
    """
    opened = {event.request_id: event.sampling.n for event in events if isinstance(event, OpenText)}

    def children_of(request_id: str) -> int:
        return opened.get(request_id) or num_children(request_id)

    current: list[DetokenizerEvent] = []
    room = MAX_SCORES
    for part in _parts_of(events, children_of):
        size = num_scores(part, children_of)
        if current and size > room:
            yield current
            current, room = [], MAX_SCORES
        current.append(part)
        room -= size
    if current:
        yield current


async def sliced(
    inbox: Channel[DetokenizerEvent], num_children: Callable[[str], int]
) -> AsyncIterator[list[DetokenizerEvent]]:
    """Yields the batches of the inbox in slices, one per loop iteration."""
    async for events in inbox.batches():
        for number, part in enumerate(slices(events, num_children)):
            if number:
                await yield_to_loop()
            yield part


def num_scores(event: DetokenizerEvent, children_of: Callable[[str], int]) -> int:
    if not isinstance(event, StepOutput):
        return 0
    scored = [each for each in event.sequences if each.logprobs or each.prompt_logprobs]
    return sum(_size_of(output, children_of) for output in scored)


def _size_of(output: SequenceOutput, children_of: Callable[[str], int]) -> int:
    size = sum(len(run.chosen) + len(run.top_ids) for run in output.logprobs)
    scores = output.prompt_logprobs
    if scores is not None:
        size += (len(scores.chosen) + len(scores.top_ids)) * children_of(output.request_id)
    return size // VALUE_BYTES


def _parts_of(
    events: Sequence[DetokenizerEvent], children_of: Callable[[str], int]
) -> Iterator[DetokenizerEvent]:
    """PERF: a step that fits is not copied, and nearly all fit."""
    for event in events:
        if not isinstance(event, StepOutput) or num_scores(event, children_of) <= MAX_SCORES:
            yield event
            continue
        for output in event.sequences:
            for part in _cut(output, children_of(output.request_id)):
                yield StepOutput(event.iteration, (part,))


def _cut(output: SequenceOutput, num_children: int) -> Iterator[SequenceOutput]:
    """Splits the prompt's scores. The last part has the rest of the output."""
    scores = output.prompt_logprobs
    if scores is None:
        yield output
        return
    num_tokens = num_values(scores.chosen)
    width = (1 + len(scores.top_ids) // len(scores.chosen)) * num_children
    step = max(1, MAX_SCORES // width)
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
