"""The wait of a request is estimated from measured rates; the test moves the clock."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from aserve.actors.wait_forecast import WaitForecast
from aserve.errors import DeadlineUnreachable, ExpectedWait, QueueFull, QueueTimeout
from aserve.messages.executor import EngineSpec, SchedulerEvent
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import AdmitRequest
from aserve.messages.step import Launch
from aserve.observability.reports import SchedulerTick
from aserve.scheduling.ahead import Ahead, ahead_of, snapshot_of
from aserve.scheduling.scheduler import Scheduler
from tests.scheduling.stage import request, spec
from tests.scheduling.step_counter import StepCounter

STEP_S, TOKEN_S = 0.010, 0.001  # of a step, and of each prompt token in it


class Device(StepCounter):
    """It needs `STEP_S` for a step and `TOKEN_S` for a prompt token. `launched_s` is the time of
    each request's first step.
    """

    def __init__(self, engine: EngineSpec) -> None:
        super().__init__(Scheduler(engine))
        self.now_s = 100.0
        self.forecast = WaitForecast(self.scheduler.state, lambda: self.now_s)
        self.launched_s: dict[str, float] = {}

    def play(self, *events: SchedulerEvent) -> list[object]:  # type: ignore[override]  # not read
        if events and not isinstance(events[0], AdmitRequest):
            step = self.batches[self.num_steps - 1]
            self.now_s += STEP_S + TOKEN_S * step.stats.num_prefill_tokens
        effects = super().play(*events)
        self.forecast.on_tick(SchedulerTick(list(events), effects))
        for effect in effects:
            if isinstance(effect, Launch):
                for row in effect.batches[0].row_inits:
                    name = self.scheduler.state.running[row.row].request_id
                    self.launched_s.setdefault(name, self.now_s)
        return [*effects]

    def ahead(self, probe: AdmitRequest) -> Ahead:
        return ahead_of(snapshot_of(self.scheduler.state), probe)

    def estimate_s(self, probe: AdmitRequest) -> float | None:
        return self.forecast.wait_s(self.ahead(probe))


def engine(*, max_rows: int = 4, budget: int = 64) -> EngineSpec:
    few = spec(num_pages=2_000, max_rows=max_rows, max_batched_tokens=budget)
    return msgspec.structs.replace(few, max_waiting=500, max_model_len=4_000)


NUMBERS = itertools.count()


def asked(
    name: str, *, client: str = "", prompt_len: int = 8, max_tokens: int = 20, priority: int = 0
) -> AdmitRequest:
    """No two prompts share a page, and none ends before `max_tokens`."""
    start = next(NUMBERS)
    prompt = [(start * 7 + position) % 100 for position in range(prompt_len)]
    made = request(name, prompt, max_tokens=max_tokens, client=client, priority=priority)
    return msgspec.structs.replace(made, page_keys=b"")


def within(made: AdmitRequest, device: Device, **times: float) -> AdmitRequest:
    """With times that begin now."""
    ends = {name: device.now_s + seconds for name, seconds in times.items()}
    return msgspec.structs.replace(made, **ends)


def busy(device: Device, num: int = 80, **fields: int) -> Device:
    """A flood of one client, whose first sequences have ended."""
    device.send(*(asked(f"flood{i}", client="flood", **fields) for i in range(num)))
    device.run(70)
    return device


# What keeps requests waiting: rows, prompt tokens, both; and a queue that other clients share.
FLOODS = {
    "rows": (engine(), {"max_tokens": 20}),
    "prompts": (engine(max_rows=64, budget=32), {"prompt_len": 60, "max_tokens": 2}),
    "both": (engine(max_rows=6), {"prompt_len": 60, "max_tokens": 12}),
}


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("client", ["flood", "light"])
def test_the_estimate_is_within_a_factor_of_two(flood: str, client: str) -> None:
    made, fields = FLOODS[flood]
    device = busy(Device(made), **fields)
    estimates: dict[str, tuple[float, float | None]] = {}  # when, and how long
    for number in range(8):
        probe = asked(f"probe{number}", client=client, **fields)
        estimates[probe.request_id] = device.now_s, device.estimate_s(probe)
        device.send(probe)
        device.run(5)
    device.run()
    one_step_s = STEP_S + made.max_batched_tokens * TOKEN_S
    waits = {name: device.launched_s[name] - at_s for name, (at_s, _) in estimates.items()}
    for name, waited_s in waits.items():
        estimate_s = estimates[name][1]
        assert estimate_s is not None
        assert waited_s / 2 - one_step_s <= estimate_s <= 2 * waited_s + one_step_s
    assert max(waits.values()) > 10 * one_step_s or client == "light", "nobody waited"


def test_nobody_is_refused_by_an_idle_server_or_without_an_estimate() -> None:
    idle = Device(engine())
    hasty = asked("hasty", prompt_len=60)
    idle.forecast.check(within(hasty, idle, strict_deadline_s=1e-6, queue_deadline_s=1e-6), [])
    busy(idle, 10).run()
    assert idle.scheduler.is_idle
    idle.forecast.check(within(hasty, idle, strict_deadline_s=1e-6, queue_deadline_s=1e-6), [])
    new = Device(engine())
    new.send(*(asked(f"flood{i}", client="flood") for i in range(60)))
    assert new.estimate_s(asked("mine", client="flood")) is None
    new.forecast.check(within(asked("mine", client="flood"), new, queue_deadline_s=0.001), [])


@pytest.mark.parametrize(
    ("times", "error", "param"),
    [
        ({"queue_deadline_s": 0.2}, QueueTimeout, "max_queue_ms"),
        ({"strict_deadline_s": 0.2}, DeadlineUnreachable, "deadline_ms"),
        ({"queue_deadline_s": 60.0}, None, ""),
        ({"deadline_s": 0.2}, None, ""),
        ({"strict_deadline_s": 60.0}, None, ""),
        ({"strict_deadline_s": 60.0, "queue_deadline_s": 0.2}, QueueTimeout, "max_queue_ms"),
    ],
)
def test_what_cannot_make_it_is_refused_at_once_with_its_place_and_wait(
    times: dict[str, float], error: type[QueueTimeout] | None, param: str
) -> None:
    device = busy(Device(engine()))
    mine = within(asked("mine", client="flood"), device, **times)
    if error is None:
        device.forecast.check(mine, [])
        return
    with pytest.raises(error) as caught:
        device.forecast.check(mine, [])
    info, ahead = caught.value.info(), device.ahead(mine)
    wait_s = device.forecast.wait_s(ahead)
    assert wait_s is not None
    assert wait_s > 0.2
    assert info.wait is not None
    assert info.wait.queue_position == len(ahead.places) + 1 > 20
    assert info.wait.expected_wait_ms == pytest.approx(1000 * wait_s, abs=1)
    assert (info.status, info.param) == (429, param)
    assert info.retry_after_s == pytest.approx(max(1.0, wait_s), abs=0.01)


def test_a_deadline_counts_the_outputs_that_must_come() -> None:
    """`ignore_eos` and `min_tokens` make an answer that long; else it may end with any token."""
    device = busy(Device(engine()), 30)
    long = asked("long", client="flood", max_tokens=400)
    wait_s = device.estimate_s(long)
    assert wait_s is not None
    may_end = msgspec.structs.replace(long, end_ids=(5,))
    device.forecast.check(within(may_end, device, strict_deadline_s=wait_s + 1), [])
    least = msgspec.structs.replace(long.sampling, min_tokens=400)
    for made in (long, msgspec.structs.replace(may_end, sampling=least)):
        with pytest.raises(DeadlineUnreachable):
            device.forecast.check(within(made, device, strict_deadline_s=wait_s + 1), [])


def test_what_comes_before_a_request_is_what_the_scheduler_admits_before_it() -> None:
    """In any mixture of clients and priorities."""
    for seed in range(6):
        device = Device(engine(max_rows=1))
        device.send(asked("first", client="a", max_tokens=3))
        for i in range(12):
            client = "abc"[(i * i + seed) % 3]
            made = asked(f"{client}{i}", client=client, priority=(i + seed) % 5 == 0, max_tokens=1)
            device.send(made)
        probe = asked("probe", client="abd"[seed % 3], max_tokens=1)
        position = len(device.ahead(probe).places)
        device.send(probe)
        device.run()
        order = sorted(device.launched_s, key=device.launched_s.__getitem__)
        assert abs(order.index("probe") - 1 - position) <= 1, (order, position)


def test_one_step_that_stands_still_changes_the_estimate_little() -> None:
    device = busy(Device(engine()))
    probe = asked("mine", client="flood")
    before = device.estimate_s(probe)
    device.now_s += 60
    device.run(1)
    after = device.estimate_s(probe)
    assert before is not None
    assert after is not None
    assert after < 1.5 * before


def test_requests_of_one_tick_see_each_other() -> None:
    device = busy(Device(engine()), 40)
    device.run()
    burst: list[SchedulerEvent] = [asked(f"b{i}", client="flood") for i in range(40)]
    mine = within(asked("mine", client="flood"), device, queue_deadline_s=0.3)
    assert device.scheduler.is_idle
    device.forecast.check(mine, [])
    with pytest.raises(QueueTimeout):
        device.forecast.check(mine, burst)


def test_a_full_queue_says_how_long_it_is() -> None:
    device = busy(Device(engine()))
    end = device.forecast.explained(Refused("r", QueueFull("full").info()))
    assert end.error is not None
    assert end.error.wait == device.forecast.at_end()
    assert isinstance(end.error.wait, ExpectedWait)
    assert end.error.wait.queue_position == device.scheduler.state.num_waiting + 1
    assert end.error.retry_after_s == pytest.approx((end.error.wait.expected_wait_ms or 0) / 1000)
    for other in (Refused("r", QueueTimeout("late").info()), Retired("r", 0, "stop", 1)):
        assert device.forecast.explained(other) is other
