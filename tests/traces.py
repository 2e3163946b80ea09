"""Random traces against the oracle: a scheduler, a fake device, and chaos between them.

A `Trace` is a value: it can be drawn by hypothesis, saved and run again. `run_trace` drives it and
asserts that every sequence's tokens, logprobs and end are those of the plain engine, that every
launch says what it must, and that nothing is left behind.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import msgspec

from aserve.errors import AserveError, StepError
from aserve.messages.base import CancelReason
from aserve.messages.changes import Amend, Amended
from aserve.messages.executor import EngineSpec, SchedulerEffect, SchedulerEvent
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel
from aserve.messages.results import BuildMask, MaskReady, StepTimes
from aserve.messages.step import Launch, Resync, Sample
from aserve.messages.transfers import (
    KvFailed,
    KvLoaded,
    KvReady,
    LoadKv,
    ReceiveKv,
    SaveKv,
    SendKv,
    StreamKv,
)
from aserve.observability.recording import Recorder
from aserve.scheduling.check import describe
from aserve.scheduling.request import child_seed
from aserve.scheduling.scheduler import Scheduler
from tests.fakes.packed_channel import Codec
from tests.fakes.rank_devices import RankDevices
from tests.fakes.toy_device import ToyMatchers
from tests.fakes.toy_tiers import ToyTiers
from tests.faults import Faults
from tests.launch_checks import LaunchChecks
from tests.stories import FailedMask, Story
from tests.watched_state import WatchedState

MAX_TURNS = 3_000
EVICT_RATE = 0.3  # turns in which the pool is under pressure, where pages go down to tiers
REASONS: tuple[CancelReason, ...] = ("stop", "cancelled", "deadline", "shutdown")
EVENTS = Codec(SchedulerEvent)
EFFECTS = Codec(SchedulerEffect)


class Trace(msgspec.Struct, frozen=True):
    spec: EngineSpec
    requests: tuple[AdmitRequest, ...]
    seed: int  # of the order of events
    cancel_rate: float = 0.0
    amend_rate: float = 0.0
    fail_rate: float = 0.0
    mask_fail_rate: float = 0.0
    transfer_fail_rate: float = 0.0
    max_stored: int = 0  # pages that the tiers hold
    lone_rate: float = 0.0  # arrivals that wait until nothing else is to be done
    events_per_turn: int = 1
    times: StepTimes | None = None


class TraceRun:
    """One trace being driven; `turns` is the recorded list of event lists."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.chaos = random.Random(trace.seed)
        self.scheduler = WatchedState(trace.spec, debug_checks=True)
        self.scheduler.changes = []
        self.scheduler.failed_masks = []
        self.ranks = RankDevices(
            [
                Faults(trace.spec, chaos=self.chaos, rate=trace.fail_rate).device
                for _ in range(trace.spec.dp_size)
            ]
        )
        self.device = self.ranks.devices[0]
        whole_prompts = {
            child_seed(request.sampling.seed, child)
            for request in trace.requests
            if not request.is_causal
            for child in range(request.sampling.n)
        }
        for device in self.ranks.devices:
            device.whole_prompts = whole_prompts
        self.matchers = ToyMatchers(trace.spec.vocab_size)
        self.tiers = ToyTiers(
            self.ranks.devices[0],
            chaos=self.chaos,
            max_pages=trace.max_stored,
            rate=trace.transfer_fail_rate,
        )
        self.commands: deque[Launch | Sample | Resync | SaveKv] = deque()
        self.asks: deque[BuildMask] = deque()
        self.transfers: list[ReceiveKv | LoadKv] = []
        self.arrivals = deque(trace.requests)
        self.arrived: dict[str, None] = {}
        self.stories = {
            (request.request_id, child): Story(request, child, trace.spec)
            for request in trace.requests
            for child in range(request.sampling.n)
        }
        self.checks = LaunchChecks(trace.spec, list(self.stories.values()))
        self.refused: dict[str, Refused] = {}
        self.turns: list[list[SchedulerEvent]] = []
        self.num_launched = 0
        self.num_asked = self.num_answered = 0  # changes

    def run(self) -> None:
        while self._has_events() or not self.scheduler.is_idle:
            assert len(self.turns) < MAX_TURNS, "the trace does not come to an end"
            events = self._next_events()
            if self.trace.times is not None and not self.turns:
                events = [self.trace.times, *events]
            can_move = (
                events or self._has_events() or self.scheduler.has_more or self.scheduler.is_idle
            )
            assert can_move, f"nobody moves: {self._who_waits()}"
            self.turns.append(events)
            if self.trace.spec.kv_tiers != "off" and self.chaos.random() < EVICT_RATE:
                self.scheduler.state.cache.evict_all()  # a replay of the trace does not do it
            effects = self.scheduler.step([EVENTS.round_trip(event) for event in events])
            for key, num_outputs, change in self.scheduler.changes:
                self.stories[key].changes.append((num_outputs, change))
            for mask in self.scheduler.failed_masks:
                assert mask.error is not None
                story = self.stories[mask.request_id, mask.child]
                story.failed_mask = FailedMask(mask.position, mask.error)
            self.scheduler.changes.clear()
            self.scheduler.failed_masks.clear()
            for effect in effects:
                self._perform(EFFECTS.round_trip(effect))
        self._check_end()

    def _has_events(self) -> bool:
        return bool(self.arrivals or self.commands or self.asks or self.transfers)

    def save(self, path: Path) -> None:
        """Writes the events so far as a recording; the last turn, in which it broke, included."""
        recorder = Recorder(path, spec=self.trace.spec)
        scheduler = Scheduler(self.trace.spec)
        for turn in self.turns:
            recorder.begin(turn)
            try:
                recorder.finish(scheduler.step(turn))
            except (AssertionError, AserveError, LookupError):
                break  # the recording ends inside the turn that broke
        recorder.close()

    def _next_events(self) -> list[SchedulerEvent]:
        events: list[SchedulerEvent] = []
        for _ in range(self.chaos.randint(1, self.trace.events_per_turn)):
            event = self._next_event()
            if event is not None:
                events.append(event)
        return events

    def _next_event(self) -> SchedulerEvent | None:
        if self.chaos.random() < self.trace.cancel_rate:
            return self._cancel_somebody()
        if self.chaos.random() < self.trace.amend_rate:
            return self._amend_somebody()
        queues = (self.arrivals, self.commands, self.asks, self.transfers)
        sources = [source for source in queues if source]
        lone_rate = self.trace.lone_rate
        if lone_rate and len(sources) > 1 and self.chaos.random() < lone_rate:
            sources = [source for source in sources if source is not self.arrivals]
        if not sources:
            return None
        source = self.chaos.choice(sources)
        if source is self.transfers:
            source = self.chaos.choice(sources)  # a transfer takes long
        if source is self.transfers:
            return self._transfer()
        if source is self.arrivals:
            self.arrived[self.arrivals[0].request_id] = None
            return self.arrivals.popleft()
        if source is self.asks:
            return self._answer(self.asks.popleft())
        command = self.commands.popleft()
        return self.tiers.save(command) if isinstance(command, SaveKv) else self.ranks.run(command)

    def _answer(self, ask: BuildMask) -> MaskReady:
        ready = self.matchers.fill(ask)
        if self.chaos.random() >= self.trace.mask_fail_rate:
            return ready
        error = StepError(f"the toy grammar broke at output {ask.position}").info()
        return MaskReady(ask.request_id, ask.child, ask.position, mask=b"", error=error)

    def _transfer(self) -> KvReady | KvFailed | KvLoaded:
        """Transfers end in any order."""
        transfer = self.transfers.pop(self.chaos.randrange(len(self.transfers)))
        if isinstance(transfer, LoadKv):
            return self.tiers.load(transfer)
        fails = self.chaos.random() < self.trace.transfer_fail_rate
        story = self.stories[transfer.request_id, transfer.child]
        return self.device.receive_kv(transfer, story.request, fails=fails)

    def _cancel_somebody(self) -> SchedulerEvent:
        """Known, finished, refused or never seen: a cancel may name anything at any moment."""
        awaiting = [(transfer.request_id, transfer.child) for transfer in self.transfers]
        request_id, child = self.chaos.choice([*self.stories, *awaiting * 4, ("nobody", 0)])
        if (request_id, child) == ("nobody", 0):
            return Cancel(request_id, None, 0, "cancelled")
        named = None if self.chaos.random() < 0.3 else child
        kept = self.chaos.randint(0, len(self.stories[request_id, child].tokens))
        cancel = Cancel(request_id, named, kept, self.chaos.choice(REASONS))
        for key, story in self.stories.items():
            is_named = key[0] == request_id and named in (None, key[1])
            if is_named and request_id in self.arrived and not story.ends:
                story.cancels.append(cancel)
        return cancel

    def _amend_somebody(self) -> Amend:
        """Of a request in any state, or of nobody; the same change may be made again."""
        kind = self.chaos.randrange(4)
        self.num_asked += 1
        return Amend(
            self.chaos.choice([*self.arrived, "nobody"]),
            self.num_asked,
            ends_reasoning=kind == 0,
            max_tokens=self.chaos.randint(1, 24) if kind == 1 else None,
            priority=self.chaos.randint(0, 2) if kind == 2 else None,
        )

    def _perform(self, effect: SchedulerEffect) -> None:
        match effect:
            case Launch():
                assert len(effect.batches) == self.trace.spec.dp_size
                self.commands.append(effect)
                self.num_launched += 1
                for batch in effect.batches:
                    if batch.rows:
                        self.checks.check(batch)
            case Sample() | Resync() | SaveKv():
                self.commands.append(effect)
            case BuildMask():
                self.asks.append(effect)
            case ReceiveKv() | LoadKv():
                self.transfers.append(effect)
            case SendKv() | StreamKv():
                raise AssertionError("nobody asked for KV")
            case StepOutput():
                for output in effect.outputs():
                    self.stories[output.request_id, output.child].take(output)
            case Amended():
                self.num_answered += 1
            case Retired():
                self.stories[effect.request_id, effect.child].ends.append(effect)
            case Refused():
                assert effect.request_id not in self.refused
                self.refused[effect.request_id] = effect

    def _check_end(self) -> None:
        for (request_id, _), story in self.stories.items():
            if request_id in self.refused:
                assert not story.ends
                assert not story.tokens
            else:
                story.check()
        assert self.scheduler.num_watched == self.num_launched, "a launch was not looked at"
        assert self.num_asked == self.num_answered
        state = self.scheduler.state
        assert state.rows.num_free == self.trace.spec.max_rows
        state.cache.check([])
        state.cache.evict_all()
        groups = self.trace.spec.groups * self.trace.spec.dp_size
        for pool, group in enumerate(groups):
            assert state.cache.num_free(pool) == group.num_pages - 1
        if state.cache.states is not None:
            num_free = state.cache.states.checkpoints.num_free
            assert num_free == self.trace.spec.num_checkpoints - 1

    def _who_waits(self) -> str:
        return "; ".join(describe(sequence) for sequence in self.scheduler.state.living())
