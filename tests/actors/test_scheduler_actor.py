"""The scheduler actor performs effects in order, keeps deadlines, and shows observers each turn."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from aserve.actors import scheduler as scheduler_module
from aserve.actors.masks import MaskActor
from aserve.actors.replay import ReplayDiffers, replay
from aserve.actors.scheduler import KvEvent, Pump, SchedulerActor, SchedulerPorts, SchedulerWatch
from aserve.channel import Channel
from aserve.errors import BugError
from aserve.grammar.matching import Constraint
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import SchedulerEvent
from aserve.messages.output import DetokenizerEvent, Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, Grammar, SamplingParams
from aserve.messages.results import StepFailed, StepResult
from aserve.messages.step import Resync, Sample, ScheduleBatch
from aserve.messages.transfers import ReceiveKv
from aserve.observability.recording import Recorder
from aserve.observability.reports import SchedulerTick
from aserve.observability.trace import Trace
from aserve.scheduling import admit as admit_module
from aserve.scheduling.request import Sequence
from aserve.scheduling.scheduler import Scheduler
from aserve.scheduling.state import SchedulerState
from aserve.scheduling.tick import max_received
from tests.fakes.executor import SPEC, FakeExecutor, FakeTicket
from tests.fakes.packed_channel import PackedChannel
from tests.fakes.toy_device import TOY, FakeDevice, ToyMatchers, expected_outputs


class Turns:
    def __init__(self) -> None:
        self.seen: list[SchedulerTick] = []

    def on_tick(self, tick: SchedulerTick) -> None:
        self.seen.append(tick)


class Rig:
    """Scheduler, pump and a fake device; what would go to the detokenizer is kept."""

    def __init__(
        self,
        executor: FakeExecutor | None = None,
        *,
        recorder: Recorder | None = None,
        has_masks: bool = False,
        transfers: Channel[KvEvent] | None = None,
    ) -> None:
        self.executor = executor or FakeExecutor()
        self.events: Channel[SchedulerEvent] = PackedChannel(SchedulerEvent)
        self.text: Channel[DetokenizerEvent] = PackedChannel(DetokenizerEvent)
        self.pump = Pump(results=self.events)
        self.turns = Turns()
        self.deaths: list[BaseException] = []
        self.died = asyncio.Event()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: list[Retired | Refused] = []
        self.masks = MaskActor(scheduler=self.events)
        masks = self.masks.inbox if has_masks else None
        ports = SchedulerPorts(self.executor, self.pump.inbox, self.text, masks, transfers)
        self.actor = SchedulerActor(
            Scheduler(self.executor.spec, debug_checks=True),
            ports,
            watch=SchedulerWatch(Trace(), (self.turns,), recorder),
            inbox=self.events,
        )

    async def __aenter__(self) -> Rig:
        self.pump.start(self._note_death)
        self.masks.start(self._note_death)
        self.actor.start(self._note_death)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.actor.stop()
        await self.masks.stop()
        await self.pump.stop()

    def constrain(self, request_id: str, n: int = 1) -> None:
        matchers = ToyMatchers(SPEC.vocab_size)
        self.masks.inbox.send(Constraint(request_id, (matchers,) * n))

    async def until_ended(self, count: int) -> None:
        """Reads the text side until so many sequences or requests had their last message."""
        async for events in self.text.batches():
            for event in events:
                self._note(event)
            if len(self.ends) >= count:
                return

    def _note(self, event: DetokenizerEvent) -> None:
        if isinstance(event, StepOutput):
            for output in event.outputs():
                key = (output.request_id, output.child)
                self.tokens.setdefault(key, []).extend(array_i32(output.token_ids).tolist())
        elif isinstance(event, Retired | Refused):
            self.ends.append(event)

    def _note_death(self, name: str, error: BaseException) -> None:
        self.deaths.append(error)
        self.died.set()


def admit(
    request_id: str = "a",
    *,
    max_tokens: int = 5,
    timeout_s: float | None = None,
    max_queue_s: float | None = None,
    n: int = 1,
    grammar: Grammar | None = None,
) -> AdmitRequest:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, n=n, grammar=grammar)
    prompt = pack_i32([3, 1, 4, 1, 5])
    ends = [None if each is None else time.monotonic() + each for each in (timeout_s, max_queue_s)]
    return AdmitRequest(request_id, prompt, sampling, deadline_s=ends[0], queue_deadline_s=ends[1])


async def test_held_rows_are_sampled_after_their_mask_and_before_they_are_launched_again() -> None:
    async with Rig(has_masks=True) as rig:
        rig.constrain("a")
        rig.events.send(admit(grammar=TOY))
        await rig.until_ended(1)
        kinds = [type(command) for command in rig.executor.commands]
    assert rig.tokens["a", 0] == expected_outputs(admit(grammar=TOY), 0, SPEC)
    assert kinds == [ScheduleBatch, Sample] * 5


async def test_a_grammar_without_a_mask_worker_is_a_bug_not_a_hang() -> None:
    async with Rig() as rig:
        rig.events.send(admit(grammar=TOY))
        await rig.until_ended(1)
    (refused,) = rig.ends
    assert isinstance(refused, Refused)
    assert refused.error.code == "bug"
    assert rig.deaths == []


async def test_kv_that_another_engine_computed_is_asked_for_and_decoded_from() -> None:
    transfers: Channel[KvEvent] = PackedChannel(KvEvent)
    asked = msgspec.structs.replace(admit(), awaits_kv=True)
    async with Rig(transfers=transfers) as rig:
        rig.events.send(asked)
        [transfer] = await anext(aiter(transfers.batches()))
        assert isinstance(transfer, ReceiveKv)
        rig.events.send(rig.executor.device.receive_kv(transfer, asked, fails=False))
        await rig.until_ended(1)
        [end] = await anext(aiter(transfers.batches()))
    assert rig.tokens["a", 0] == expected_outputs(asked, 0, SPEC)
    assert [end] == rig.ends


async def test_a_request_that_awaits_kv_is_refused_by_an_engine_that_gets_none() -> None:
    async with Rig() as rig:
        rig.events.send(msgspec.structs.replace(admit(), awaits_kv=True))
        await rig.until_ended(1)
    [refused] = rig.ends
    assert isinstance(refused, Refused)
    assert refused.error.code == "bug"
    assert rig.deaths == []


async def test_a_failed_step_is_resynchronised_and_changes_no_token() -> None:
    device = FakeDevice(SPEC, must_fail=lambda batch: batch.iteration == 3)
    async with Rig(FakeExecutor(device=device)) as rig:
        rig.events.send(admit(n=2))
        await rig.until_ended(2)
    assert any(isinstance(command, Resync) for command in rig.executor.commands)
    for child in (0, 1):
        assert rig.tokens["a", child] == expected_outputs(admit(n=2), child, SPEC)


@pytest.mark.parametrize("end", ["finished", "cancelled", "refused"])
async def test_no_timer_is_left_of_a_request_that_ended_before_its_deadline(end: str) -> None:
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    call_later = loop.call_later

    def noting(delay: float, *args: object) -> asyncio.TimerHandle:
        timers.append(call_later(delay, *args))  # type: ignore[arg-type]  # passed on as it came
        return timers[-1]

    loop.call_later = noting  # type: ignore[method-assign,assignment]  # to see the timers
    async with Rig(FakeExecutor(is_manual=end == "cancelled")) as rig:
        rig.events.send(admit(timeout_s=60, max_queue_s=50, n=600 if end == "refused" else 1))
        if end == "cancelled":
            rig.events.send(Cancel("a", None, 0, "cancelled"))
        await rig.until_ended(1)
        assert all(timer.cancelled() for timer in timers)
        assert len(timers) == 2


@pytest.mark.parametrize("waits", [False, True])
async def test_only_a_request_that_still_waits_is_refused_after_its_longest_wait(
    waits: bool,
) -> None:
    async with Rig(FakeExecutor(is_manual=True)) as rig:
        if waits:
            rig.events.send(admit("running", n=SPEC.max_rows))
            await rig.executor.until_given(1)
        rig.events.send(admit("b", max_queue_s=0.02, timeout_s=0.2))
        async with asyncio.timeout(60):
            await rig.until_ended(1)
        if waits:
            rig.events.send(Cancel("running", None, 0, "cancelled"))
            await rig.until_ended(1 + SPEC.max_rows)
    (end,) = [end for end in rig.ends if end.request_id == "b"]
    assert isinstance(end, Retired)
    if not waits:
        assert (end.reason, end.error) == ("deadline", None)
        return
    assert end.error is not None
    assert (end.reason, end.num_outputs, end.error.code) == ("error", 0, "queue_timeout")
    assert (end.error.status, end.error.param) == (429, "max_queue_ms")
    assert end.error.wait is not None
    assert not [item for tick in rig.turns.seen for item in tick.admitted if item.request_id == "b"]


async def test_a_deadline_holds_until_the_last_child_has_ended() -> None:
    async with Rig(FakeExecutor(is_manual=True)) as rig:
        rig.events.send(admit(timeout_s=0.02, n=2))
        await rig.executor.until_given(1)  # the timer is set
        rig.events.send(Cancel("a", 0, 0, "cancelled"))
        async with asyncio.timeout(60):
            await rig.until_ended(2)
    assert [end.reason for end in rig.ends if isinstance(end, Retired)] == ["cancelled", "deadline"]


async def test_a_bug_carries_the_story_of_the_requests_that_were_at_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(scheduler: Scheduler, event: SchedulerEvent) -> None:
        raise BugError("an invariant does not hold")

    async with Rig() as rig:
        rig.events.send(admit())
        await rig.until_ended(1)
        monkeypatch.setattr(Scheduler, "handle", broken)
        rig.events.send(Cancel("a", None, 0, "cancelled"))
        await rig.died.wait()
    notes = "\n".join(rig.deaths[0].__notes__)
    assert "admission requested, 5 tokens" in notes
    assert "retired: length, 5 tokens" in notes


async def test_a_replay_that_decides_otherwise_is_found(tmp_path: Path) -> None:
    path = tmp_path / "r"
    recorder = Recorder(path, spec=SPEC)
    async with Rig(recorder=recorder, has_masks=True) as rig:
        rig.events.send(admit("a", n=2))
        rig.constrain("b")
        rig.events.send(admit("b", grammar=TOY))
        await rig.until_ended(3)
    recorder.close()
    lines = list(replay(path))
    assert sum(" retired " in line for line in lines) == 3
    data = path.read_bytes()
    # The same header and turns, but the prompt of the first request is another.
    changed = data.replace(pack_i32([3, 1, 4, 1, 5]), pack_i32([3, 1, 4, 1, 6]), 1)
    assert len(changed) == len(data)
    path.write_bytes(changed)
    with pytest.raises(ReplayDiffers, match="tick 1"):
        list(replay(path))


async def test_a_replay_passes_over_a_request_that_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def consider(state: SchedulerState, request: AdmitRequest) -> list[Sequence] | Refused:
        if request.request_id == "b":
            raise ValueError("not to be considered")
        return admit_module.consider(state, request)

    monkeypatch.setattr(scheduler_module, "consider", consider)
    recorder = Recorder(tmp_path / "r", spec=SPEC)
    async with Rig(recorder=recorder) as rig:
        for name in "abc":
            rig.events.send(admit(name))
        await rig.until_ended(3)
    recorder.close()
    lines = list(replay(tmp_path / "r"))
    assert [line for line in lines if "skipped" in line] == [
        "tick 1 skipped request=b, which raised an exception"
    ]
    assert sum(" retired " in line for line in lines) == 2


async def test_many_requests_at_once_are_received_over_several_turns() -> None:
    async with Rig() as rig:
        for number in range(200):
            rig.events.send(admit(f"r{number}", max_tokens=1))
        rig.events.send(Cancel("r199", None, 0, "cancelled"))
        await rig.until_ended(200)
    arrived = [sum(isinstance(e, AdmitRequest) for e in tick.events) for tick in rig.turns.seen]
    assert sum(arrived) == 200
    assert max(arrived) == max_received(0)
    assert sorted(end.request_id for end in rig.ends) == sorted(f"r{n}" for n in range(200))


async def test_the_pump_posts_results_in_launch_order_even_if_a_later_step_ends_first() -> None:
    """A failed step is a value and does not stop the pump, nor does one that never ends."""
    deaths: list[str] = []
    results: Channel[SchedulerEvent] = Channel()
    pump = Pump(results=results)
    first, second = FakeTicket(1), FakeTicket(2)
    pump.start(lambda name, _: deaths.append(name))
    for ticket in (first, second, FakeTicket(3)):
        pump.inbox.send(ticket)
    good = StepResult(2, rows=b"", counts=b"", tokens=b"")
    second.result.set_result(good)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(results) == 0
    failed = StepFailed(1, BugError("broken").info())
    first.result.set_result(failed)
    assert await anext(results.batches()) == [failed, good]
    async with asyncio.timeout(60):
        await pump.stop()
    assert deaths == []
