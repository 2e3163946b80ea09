"""The watch of steps: what is in flight without a result is noticed, and slow work is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aserve.observability.engine_watch import EngineWatch, StageReporter
from aserve.observability.reports import LaunchedSteps, StartupStage, TickReport


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tick(*, launched: int = 0, finished: int = 0, failed: int = 0) -> TickReport:
    steps = LaunchedSteps(launched, 1, 0, 0, 9) if launched else None
    return TickReport(num_finished=finished, num_failed=failed, launched=steps)


def test_a_long_prefill_is_not_stuck_and_a_lost_step_is() -> None:
    watch = EngineWatch(clock=(clock := Clock()))
    watch.on_report(tick(launched=2))
    for _ in range(50):
        clock.now += 60
        assert watch.step_age_s() == 60
        watch.on_report(tick(launched=1, finished=1))
    clock.now += 1000
    assert watch.step_age_s() == 1000
    watch.on_report(tick(failed=2))
    assert watch.step_age_s() == 0
    clock.now += 1000
    watch.on_report(tick(launched=1))
    assert watch.step_age_s() == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(0, 9)), max_size=30))
def test_the_age_is_the_time_since_a_step_came_back_or_the_first_was_launched(
    ticks: list[tuple[int, int, float]],
) -> None:
    watch = EngineWatch(clock=(clock := Clock()))
    in_flight, since = 0, 0.0
    for launched, wanted, pause in ticks:
        clock.now += pause
        returned = min(wanted, in_flight)
        if returned or not in_flight:
            since = clock.now
        in_flight += launched - returned
        watch.on_report(tick(launched=launched, finished=returned))
        clock.now += 1
        assert watch.step_age_s() == (clock.now - since if in_flight else 0)


def test_a_stage_is_reported_once_and_then_once_per_percent() -> None:
    sent: list[StartupStage] = []
    report = StageReporter(sent.append, call=lambda send, stage: send(stage))
    report("kernels")
    report("kernels")
    for done in range(0, 10_001, 5):
        report("weights", done, 10_000)
    assert [stage.stage for stage in sent[:2]] == ["kernels", "weights"]
    assert [stage.done for stage in sent[1:]] == list(range(0, 10_001, 100))
