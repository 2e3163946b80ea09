"""The scheduler actor: it passes events to the scheduler and performs the effects in order.

All decisions are in aserve.scheduling. This actor tells the observers about each tick after all
its effects were performed.

A request is checked, and considered by the scheduler, before anything changes: what that raises
ends this request alone. An exception in any other decision leaves the state half changed, so it
ends the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from aserve.actors.admission import check_request
from aserve.actors.base import Actor
from aserve.actors.deadlines import RequestTimers
from aserve.actors.masks import MaskEvent
from aserve.channel import Channel, Sink
from aserve.errors import BugError, ErrorInfo
from aserve.host.memory import PausedCollector
from aserve.messages.changes import Amended
from aserve.messages.executor import Executor, SchedulerEffect, SchedulerEvent, Ticket
from aserve.messages.output import DetokenizerEvent, Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel
from aserve.messages.results import BuildMask
from aserve.messages.step import Launch, Resync, Sample
from aserve.messages.transfers import KvEffect, LoadKv, ReceiveKv, SaveKv, SendKv, StreamKv
from aserve.observability.recording import Recorder
from aserve.observability.reports import Admitted, SchedulerObserver, SchedulerTick
from aserve.observability.trace import Trace
from aserve.scheduling.admit import consider, receive
from aserve.scheduling.scheduler import Scheduler
from aserve.scheduling.tick import Arrivals

# for transfers between engines
PeerEvent: TypeAlias = ReceiveKv | SendKv | StreamKv | Retired | Refused
KvEvent: TypeAlias = KvEffect | Retired | Refused


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    """The receivers of effects. Without `masks` no request may have a grammar, and without `kv`
    none may await its KV.
    """

    executor: Executor
    tickets: Channel[Ticket]
    text: Sink[DetokenizerEvent]
    masks: Channel[MaskEvent] | None = None
    kv: Sink[KvEvent] | None = None


@dataclass(frozen=True, slots=True)
class SchedulerWatch:
    """The observers. `recorder` gets events before the scheduler; the others get whole ticks."""

    trace: Trace
    observers: tuple[SchedulerObserver, ...] = ()
    recorder: Recorder | None = None


class SchedulerActor(Actor[SchedulerEvent]):
    def __init__(
        self,
        scheduler: Scheduler,
        ports: SchedulerPorts,
        *,
        watch: SchedulerWatch,
        inbox: Channel[SchedulerEvent],
    ) -> None:
        super().__init__("scheduler", inbox=inbox, story=watch.trace.story)
        self._scheduler = scheduler
        self._arrivals = Arrivals()
        self._goes_on = False  # a task will run the next tick, for work that this one left over
        self._ports = ports
        self._watch = watch
        self._timers = RequestTimers(scheduler.state, inbox.send)
        ours: tuple[SchedulerObserver, ...] = (self._timers, watch.trace)
        self._observers = (*ours, *watch.observers)

    def backlog(self) -> int:
        return super().backlog() + len(self._arrivals)

    def handle(self, events: list[SchedulerEvent]) -> None:
        state = self._scheduler.state
        num_running, may_launch = len(state.running), len(state.steps) < state.spec.depth
        with PausedCollector():
            events = self._arrivals.next_tick(
                events, num_running=num_running, may_launch=may_launch
            )
            events = self._checked(events)
            effects = self._decide(events)
            for effect in effects:
                self._perform(effect)
            tick = self._tick(events, effects)
            for observer in self._observers:
                observer.on_tick(tick)
        if (self._arrivals or self._scheduler.has_more) and not self._goes_on:
            self._goes_on = True
            self.spawn(self._go_on())

    def end_request(self, request_id: str, error: ErrorInfo) -> None:
        """Refuses a request that the scheduler has not received."""
        self._timers.clear(request_id)
        self._tell_end(Refused(request_id, error))

    async def stop(self) -> None:
        self._timers.close()
        await super().stop()

    async def _go_on(self) -> None:
        """Runs the next tick in a later iteration of the loop, so that other tasks run between."""
        self._goes_on = False
        self.beat()
        self.handle(self.inbox.take())

    def _checked(self, events: list[SchedulerEvent]) -> list[SchedulerEvent]:
        """Removes the requests that fail their check, and sends their final messages."""
        checked: list[SchedulerEvent] = []
        for event in events:
            if isinstance(event, AdmitRequest):
                self.attempt(event.request_id, self._check, event, checked)
            else:
                checked.append(event)
        return checked

    def _check(self, request: AdmitRequest, checked: list[SchedulerEvent]) -> None:
        check_request(
            request,
            self._scheduler.state.spec,
            has_masks=self._ports.masks is not None,
            has_transfers=self._ports.kv is not None,
        )
        self._timers.start(request, checked)
        checked.append(request)

    def _decide(self, events: list[SchedulerEvent]) -> list[SchedulerEffect]:
        recorder = self._watch.recorder
        if recorder is not None:
            recorder.begin(events)
        try:
            for event in events:
                self._handle_one(event)
            effects = self._scheduler.end_tick()
        except (BugError, AssertionError) as error:
            for request_id in sorted(_named(events)):
                error.add_note(self._watch.trace.story(request_id))
            raise
        if recorder is not None:
            recorder.finish(effects)
        return effects

    def _handle_one(self, event: SchedulerEvent) -> None:
        if not isinstance(event, AdmitRequest):
            self._scheduler.handle(event)
            return
        state = self._scheduler.state
        arrival = self.attempt(event.request_id, consider, state, event)
        if arrival is not None:
            receive(state, arrival)
        elif self._watch.recorder is not None:
            self._watch.recorder.skip(event.request_id)

    def _perform(self, effect: SchedulerEffect) -> None:
        ports = self._ports
        match effect:
            case Launch():
                ports.tickets.send(ports.executor.launch(*effect.batches))
            case Sample():
                ports.tickets.send(ports.executor.sample(effect))
            case Resync():
                ports.executor.resync(effect)
            case StepOutput() | Amended():
                ports.text.send(effect)
            case Retired() | Refused():
                self._tell_end(self._timers.forecast.explained(effect))
            case ReceiveKv() | SendKv() | StreamKv() | LoadKv() | SaveKv():
                if ports.kv is None:
                    raise BugError(f"nothing here transfers KV: {effect}")
                ports.kv.send(effect)
            case BuildMask():
                if ports.masks is None:
                    raise BugError(f"no matcher for grammar request {effect.request_id}")
                ports.masks.send(effect)
            case _:
                assert_never(effect)

    def _tell_end(self, end: Retired | Refused) -> None:
        self._ports.text.send(end)
        if self._ports.masks is not None:
            self._ports.masks.send(end)
        if self._ports.kv is not None:
            self._ports.kv.send(end)

    def _tick(self, events: list[SchedulerEvent], effects: list[SchedulerEffect]) -> SchedulerTick:
        state = self._scheduler.state
        admitted = [
            Admitted(sequence.request_id, sequence.child, row.row, batch.iteration)
            for effect in effects
            if isinstance(effect, Launch)
            for batch in effect.batches
            for row in batch.row_inits
            if (sequence := state.running.get(row.row)) is not None
        ]
        return SchedulerTick(
            *(events, effects, tuple(admitted)),
            num_running=len(state.running),
            num_waiting=state.num_waiting,
            used_pages=state.cache.num_used(0),
            cached_pages=state.cache.num_cached(0),
            num_waiting_clients=state.waiting.num_clients,
            began_s=self._beat_at_s,
        )


def _named(events: list[SchedulerEvent]) -> set[str]:
    """Returns the ids of requests that the events name. Results name only rows."""
    return {event.request_id for event in events if isinstance(event, AdmitRequest | Cancel)}


class Pump(Actor[Ticket]):
    """Awaits the tickets of steps, in order, and sends their results to the scheduler."""

    def __init__(self, *, results: Channel[SchedulerEvent]) -> None:
        super().__init__("pump")
        self._results = results

    async def run(self) -> None:
        """NOTE: the await has no deadline, because a step may take any time (see supervisor.py)."""
        async for tickets in self.inbox.batches():
            for ticket in tickets:
                result = await ticket
                self.beat()
                self._results.send(result)
