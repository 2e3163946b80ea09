"""Measures the tokens per second of the embedded engine: actors, text and executor in one
process.
"""

from __future__ import annotations

import asyncio

from aserve.bench.batch_times import Scenario
from aserve.bench.batches import OURS, measure_batches
from aserve.bench.offline import OurEngine
from aserve.bench.windows import TokenWindows
from aserve.config import Resolved
from aserve.engine import Engine
from aserve.host.threads import new_event_loop
from aserve.load import load


def embedded_rates(
    scenarios: list[Scenario], resolved: Resolved, *, repeats: int
) -> dict[Scenario, dict[str, float]]:
    """Returns figures of batch_times.py. A warm-up run of each scenario is not counted."""
    loaded = load(resolved)

    async def run() -> dict[Scenario, dict[str, float]]:
        windows = TokenWindows(loaded.text.tokenizer, seed=0)
        found: dict[Scenario, dict[str, float]] = {}
        async with Engine(resolved, loader=lambda _: loaded) as engine:
            ours = OurEngine(engine)
            for scenario in scenarios:
                prompts = [windows.ids(scenario.input_len) for _ in range(scenario.num_prompts)]
                await ours.generate(prompts, scenario.output_len)
                times = await measure_batches(
                    [scenario], {OURS: ours.generate}, windows, repeats=repeats
                )
                found[scenario] = times[scenario.name][OURS].figures()
        return found

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run())
