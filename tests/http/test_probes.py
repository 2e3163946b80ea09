"""The health probes: true in both directions, in each phase, without a question to the engine."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.http.probes import STUCK_S
from aserve.messages.base import ServerPhase
from aserve.observability.reports import LaunchedSteps, StartupStage, TickReport
from tests.fakes.echo_engine import EchoEngine
from tests.http.asking import ask, told

PROBES = ("/health", "/livez", "/readyz", "/startupz")


async def statuses(echo: EchoEngine) -> list[int]:
    return [(await ask(echo, path)).status for path in PROBES]


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("starting", [503, 200, 503, 503]),
        ("ready", [200, 200, 200, 200]),
        ("draining", [503, 200, 503, 200]),
        ("dead", [503, 503, 503, 200]),
    ],
)
async def test_each_probe_follows_the_phase(
    echo: EchoEngine, phase: ServerPhase, expected: list[int]
) -> None:
    echo.state.phase, echo.state.reason = phase, "because"
    assert await statuses(echo) == expected
    for path in PROBES:
        answer = await ask(echo, path)
        assert answer.headers["Cache-Control"] == "no-store"
        if answer.status == 503 and path != "/startupz":
            assert answer.json == {"status": phase, "reason": "because"}


async def test_a_silent_engine_is_stuck_and_its_requests_still_wait(echo: EchoEngine) -> None:
    echo.state.engine_age_s = lambda: STUCK_S + 2
    assert await statuses(echo) == [503, 503, 503, 200]
    body = {"status": "stuck", "reason": "the engine has sent nothing for 12 seconds"}
    assert (await ask(echo, "/livez")).json == body
    await told(echo, "/v1/completions", {"prompt": "a"})
    echo.state.engine_age_s = lambda: STUCK_S - 2
    assert await statuses(echo) == [200, 200, 200, 200]


async def test_a_step_that_does_not_come_back_is_stuck_after_the_watchdogs_time() -> None:
    async with EchoEngine(watchdog_timeout=100.0) as echo:
        times = [0.0]
        echo.state.watch._clock = lambda: times[-1]
        echo.state.watch.on_report(TickReport(launched=LaunchedSteps(1, 1, 0, 0, 9)))
        for time_s, expected in ((99.0, 200), (101.0, 503)):
            times.append(time_s)
            assert (await ask(echo, "/livez")).status == expected
        answer = await ask(echo, "/health")
        assert answer.json["reason"] == "no step of the engine has ended for 101 seconds"
        echo.state.watch.on_report(TickReport(num_finished=1))
        assert await statuses(echo) == [200, 200, 200, 200]


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        (StartupStage("kernels"), {"stage": "kernels"}),
        (
            StartupStage("weights", 1 << 30, 3 << 30),
            {"stage": "weights", "percent": 33, "done": 1 << 30, "total": 3 << 30},
        ),
        (StartupStage("graphs", 0, 7), {"stage": "graphs", "percent": 0, "done": 0, "total": 7}),
    ],
)
async def test_a_start_shows_its_stage_and_how_far_it_is(
    echo: EchoEngine, stage: StartupStage, shown: dict[str, Any]
) -> None:
    echo.state.phase = "starting"
    echo.state.watch.on_report(stage)
    body = (await ask(echo, "/startupz")).json
    assert 0 < body.pop("elapsed_s") < 60
    assert body == {"status": "starting"} | shown
    echo.state.phase = "ready"
    assert (await ask(echo, "/startupz")).json == {"status": "started"}


async def test_a_server_is_ready_when_its_grammar_worker_is_and_stays_so_in_later_starts(
    echo: EchoEngine,
) -> None:
    report = echo.state.watch.on_report
    report(StartupStage("grammars"))
    assert await statuses(echo) == [503, 200, 503, 503]
    assert (await ask(echo, "/startupz")).json["stage"] == "grammars"
    await told(echo, "/v1/completions", {"prompt": "answered already"})
    report(StartupStage("started"))
    assert await statuses(echo) == [200, 200, 200, 200]
    report(StartupStage("grammars"))
    assert await statuses(echo) == [200, 200, 200, 200]
