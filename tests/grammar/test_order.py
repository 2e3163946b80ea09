"""The order of events under overlap: launched before the mask is known, sampled after it."""

from __future__ import annotations

import asyncio
import threading

from aserve.actors.masks import MaskActor
from aserve.actors.scheduler import Pump, SchedulerActor, SchedulerPorts, SchedulerWatch
from aserve.channel import Channel
from aserve.grammar.matching import Constraint
from aserve.messages.base import array_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import DetokenizerEvent, Retired
from aserve.messages.results import BuildMask, MaskReady, SampleResult, StepResult
from aserve.messages.step import Launch, Sample
from aserve.observability.reports import SchedulerTick
from aserve.observability.trace import Trace
from aserve.scheduling.scheduler import Scheduler
from tests.fakes.hash_model import HashModel
from tests.fakes.toy_device import TOY, ToyMatchers
from tests.gpu.drive import make_executor, request


class LateMatcher:
    """Fills no mask before the gate opens."""

    def __init__(self, vocab_size: int) -> None:
        self.gate = threading.Event()
        self._matchers = ToyMatchers(vocab_size)

    def fill(self, ask: BuildMask) -> MaskReady:
        assert self.gate.wait(60)
        return self._matchers.fill(ask)


class Story:
    """What reached the scheduler and what it did, in order, by name and iteration or position."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, object]] = []

    def on_tick(self, tick: SchedulerTick) -> None:
        for event in (*tick.events, *tick.effects):
            match event:
                case StepResult() | SampleResult() | Sample():
                    self.lines.append((type(event).__name__, event.iteration))
                case Launch():
                    [batch] = event.batches
                    held = tuple(array_i32(batch.held_rows).tolist())
                    self.lines.append(("Launch", (batch.iteration, held)))
                case BuildMask() | MaskReady():
                    self.lines.append((type(event).__name__, event.position))
                case Retired():
                    self.lines.append(("Retired", event.request_id))
                case _:
                    pass

    def index(self, name: str, what: object) -> int:
        return self.lines.index((name, what))


async def retired(text: Channel[DetokenizerEvent], request_id: str) -> None:
    async with asyncio.timeout(60):
        async for events in text.batches():
            if any(isinstance(e, Retired) and e.request_id == request_id for e in events):
                return


async def test_a_step_is_launched_before_its_mask_and_rows_without_a_grammar_do_not_wait() -> None:
    executor = make_executor(HashModel(), depth=2, lead=2)
    events: Channel[SchedulerEvent] = Channel()
    text: Channel[DetokenizerEvent] = Channel()
    pump, masks, story = Pump(results=events), MaskActor(scheduler=events), Story()
    scheduler = SchedulerActor(
        Scheduler(executor.spec, debug_checks=True),
        SchedulerPorts(executor, pump.inbox, text, masks.inbox),
        watch=SchedulerWatch(Trace(), (story,)),
        inbox=events,
    )
    late = LateMatcher(executor.spec.vocab_size)
    executor.start(asyncio.get_running_loop())
    for actor in (pump, masks, scheduler):
        actor.start(lambda _, error: None)
    try:
        masks.inbox.send(Constraint("held", (late,)))
        events.send(request("held", [1, 2, 3], grammar=TOY, max_tokens=3))
        events.send(request("free", [4, 5, 6], max_tokens=5))
        await retired(text, "free")
        assert ("MaskReady", 0) not in story.lines, "it ended while the mask was still missing"
        late.gate.set()
        await retired(text, "held")
    finally:
        for actor in (scheduler, masks, pump):
            await actor.stop()
        executor.close()
    held_row = (1,)
    in_order = [
        story.index("BuildMask", 0),
        story.index("Launch", (1, held_row)),
        story.index("StepResult", 1),
        story.index("Retired", "free"),
        story.index("MaskReady", 0),
        story.index("Sample", 1),
        story.index("SampleResult", 1),
        story.index("BuildMask", 1),
    ]
    assert in_order == sorted(in_order)
    launches = [what for name, what in story.lines if name == "Launch"]
    second = next(what for what in launches[1:] if isinstance(what, tuple) and what[1] == held_row)
    # Its forward runs although neither the token before nor its own mask is known.
    assert story.index("Sample", 1) < story.index("Launch", second)
    assert story.index("Launch", second) < story.index("SampleResult", 1)
    assert story.index("Launch", second) < story.index("MaskReady", 1)
