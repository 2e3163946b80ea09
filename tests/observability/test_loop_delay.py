"""The delay of the loop is measured from when a timer was due, and the longest one is kept."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from aserve.observability.loop_delay import INTERVAL_S, LoopDelay


async def test_late_timers_are_counted_and_the_longest_delay_stays() -> None:
    registry = CollectorRegistry()
    now = 100.0
    delay = LoopDelay(registry, clock=lambda: now)
    loop = asyncio.get_running_loop()
    delay.start(loop)
    for late_s in (0.0, 0.4, 0.015, -0.001):
        delay.stop()
        now += INTERVAL_S + late_s
        delay.fire(loop)
    delay.stop()

    def figure(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"aserve_event_loop_{name}", labels)

    assert round(figure("max_delay_seconds") or 0, 6) == 0.4
    counts = [figure("delay_seconds_bucket", le=edge) for edge in ("0.005", "0.02", "0.2", "0.5")]
    assert counts == [2, 3, 3, 4]


COUNT = "aserve_event_loop_delay_seconds_count"


async def test_the_delay_is_measured_repeatedly() -> None:
    registry = CollectorRegistry()
    delay = LoopDelay(registry)
    delay.start(asyncio.get_running_loop())
    async with asyncio.timeout(60):
        while (registry.get_sample_value(COUNT) or 0) < 2:  # noqa: ASYNC110
            await asyncio.sleep(INTERVAL_S)
    delay.stop()
    count = registry.get_sample_value(COUNT)
    await asyncio.sleep(3 * INTERVAL_S)
    assert registry.get_sample_value(COUNT) == count, "it was stopped"
