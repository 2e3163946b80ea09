"""Keeps the past events of each request, in order and bounded in number, for error reports.

The scheduler actor, the gateway and the delivery of chunks add events. BugErrors and the log show
them.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeAlias

from aserve.messages.base import num_values
from aserve.messages.executor import SchedulerEffect, SchedulerEvent
from aserve.messages.output import OutputChunk, Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, FailRequest
from aserve.messages.results import MaskReady
from aserve.observability.reports import SchedulerTick

MAX_REQUESTS = 1024
MAX_EVENTS = 64
MAX_STEPS = 8  # whose outputs are kept: at most 140 bytes for each of their rows


# Time and event. PERF: an empty deque has 760 bytes, an empty list 56.
Story: TypeAlias = list[tuple[float, str]]


class Trace:
    """Keeps at most `max_requests` requests, and the last `max_events` events of each.

    Output tokens are no events, since they would displace all others. PERF: the last steps' outputs
    are kept as they are, and looked through when a story is told; a note for each took 0.2 ms of a
    step of 256 rows.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_requests: int = MAX_REQUESTS,
        max_events: int = MAX_EVENTS,
    ) -> None:
        self._clock = clock
        self._max_requests = max_requests
        self._max_events = max_events
        self._stories: OrderedDict[str, Story] = OrderedDict()
        self._outputs: deque[StepOutput] = deque(maxlen=MAX_STEPS)

    def note(self, request_id: str, event: str) -> None:
        story = self._story_of(request_id)
        story.append((self._clock(), event))
        if len(story) > self._max_events:
            del story[0]

    def story(self, request_id: str) -> str:
        """Returns one line per event, with milliseconds since the first, and one line per child."""
        story = self._stories.get(request_id)
        if story is None:
            return f"request {request_id}: no events are known"
        start_s = story[0][0] if story else 0.0
        lines = [f"  +{(at - start_s) * 1000:.1f} ms {event}" for at, event in story]
        for child, (num_tokens, iteration) in self._last_outputs(request_id).items():
            lines.append(f"  child {child} has {num_tokens} tokens, the last from step {iteration}")
        return "\n".join([f"request {request_id}:", *lines])

    def _last_outputs(self, request_id: str) -> dict[int, tuple[int, int]]:
        """Returns the number of tokens of each child that had some lately, and their step."""
        return {
            output.child: (output.position + num_values(output.token_ids), step.iteration)
            for step in self._outputs
            for output in step.outputs()
            if output.request_id == request_id
        }

    def on_tick(self, tick: SchedulerTick) -> None:
        for event in tick.events:
            self._note_event(event)
        for item in tick.admitted:
            what = f"child {item.child} runs in row {item.row} from step {item.iteration}"
            self.note(item.request_id, what)
        for effect in tick.effects:
            self._note_effect(effect)

    def _note_event(self, event: SchedulerEvent) -> None:
        match event:
            case AdmitRequest():
                self.note(
                    event.request_id, f"admission requested, {num_values(event.prompt_ids)} tokens"
                )
            case Cancel():
                who = "all children" if event.child is None else f"child {event.child}"
                kept = f", kept {event.kept}" if event.reason == "stop" else ""
                self.note(event.request_id, f"cancel of {who}: {event.reason}{kept}")
            case MaskReady():
                what = f"child {event.child} has the mask of output {event.position}"
                self.note(event.request_id, what)
            case FailRequest():
                self.note(event.request_id, f"failed outside the scheduler: {event.error.code}")
            case _:
                pass  # results name only rows; the tokens of a request are in its StepOutput

    def delivered(self, chunk: OutputChunk) -> None:
        """Adds an event for the last chunk only, because text is not kept."""
        if chunk.is_last:
            reason = chunk.error.code if chunk.error else chunk.finish_reason
            self.note(chunk.request_id, f"answered: {reason}")

    def _story_of(self, request_id: str) -> Story:
        story = self._stories.get(request_id)
        if story is None:
            story = self._stories[request_id] = []
            if len(self._stories) > self._max_requests:
                self._stories.popitem(last=False)
        return story

    def _note_effect(self, effect: SchedulerEffect) -> None:
        match effect:
            case StepOutput():
                self._outputs.append(effect)
            case Retired():
                what = f"child {effect.child} retired: {effect.reason}, {effect.num_outputs} tokens"
                self.note(effect.request_id, what)
            case Refused():
                self.note(effect.request_id, f"refused: {effect.error.message}")
            case _:
                pass
