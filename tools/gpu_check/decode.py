"""Measures decode steps of one model at several batch sizes: the rates of the executor and of the
whole engine relative to the bare replay of the captured step, the time that the device idles
between two steps, and the share of the copy bandwidth that a step of one row uses.

All rates are tokens per second of one batch whose rows decode together:

- executor: the scheduler and the executor, without actors and text (bench one-batch);
- engine: the embedded engine, with actors and text (bench offline);
- replay: the captured step alone, repeated without a pause. Its rows have the lengths that they
  have in the middle of the executor's run, so that both read equally much KV.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import torch

from aserve.bench.batch_times import Scenario
from aserve.bench.device_rates import copy_rate, times_s
from aserve.bench.one_batch import Shape, requests_of, summarize
from aserve.bench.result import median, percentile, spread
from aserve.bench.step_driver import StepDriver, StepTime, running
from aserve.bench.windows import TokenWindows
from aserve.gpu.build import build_on
from aserve.gpu.device.base import Device
from aserve.gpu.executor import TorchExecutor
from aserve.host.threads import new_event_loop
from aserve.load import build_options
from aserve.text.load import load_numeric_tokenizer
from tools.gpu_check.embedded_rate import embedded_rates
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting, resolved_of
from tools.gpu_check.watch import Watch, watched

SMALL = "small"
MAX_WARM_UPS = 16  # a busy machine seldom leaves time to capture a graph


def measure(setting: Setting, which: str) -> Figures:
    sizes = setting.sizes
    model = sizes.small if which == SMALL else sizes.large
    max_len = sizes.input_len + sizes.output_len
    flags = setting.flags(model, num_rows=sizes.most_rows, max_len=max_len)
    all_at_once = {"max_num_batched_tokens": sizes.most_rows * sizes.input_len}
    resolved = resolved_of(flags | all_at_once)
    device, watch = watched(setting.open_device())
    model_dir = model.write(setting.folder)
    executor = build_on(device, setting.for_steps(build_options(resolved, model_dir)))
    bench = StepBench(executor, device, watch, setting=setting, model_dir=model_dir)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        figures = runner.run(bench.run())
    figures["copy_gb_per_s"] = round(copy_rate(sizes.copy_bytes, device.torch_device) / 1e9, 1)
    figures |= _bandwidth(figures, model.step_bytes)
    setting.keep(figures)
    watch.clear()  # the last graph keeps what it reads, such as the pools
    del bench, executor
    scenarios = [Scenario(f"b{n}", n, sizes.input_len, sizes.output_len) for n in sizes.batches]
    rates = embedded_rates(scenarios, resolved, repeats=sizes.repeats)
    for scenario, found in rates.items():
        figures |= _over_replay("engine", found["decode_tok_s"], figures, scenario.num_prompts)
    return figures


def _bandwidth(figures: Figures, step_bytes: int) -> Figures:
    """Returns the bandwidth of a step of one row, which is the bytes of its weights over its time,
    as a share of the copy bandwidth. The latter counts bytes read and bytes written.
    """
    rates = {"": "executor_tok_s_b1", "replay_": "replay_tok_s_b1"}
    copy = _number(figures, "copy_gb_per_s") * 1e9
    return {
        f"{kind}bandwidth_share_b1": round(_number(figures, rate) * step_bytes / copy, 4)
        for kind, rate in rates.items()
        if rate in figures
    }


def _over_replay(kind: str, rate: float, figures: Figures, batch: int) -> Figures:
    """Returns a rate and, if there is a replay, its ratio to the rate of the replay."""
    found: Figures = {f"{kind}_tok_s_b{batch}": round(rate, 1)}
    if f"replay_tok_s_b{batch}" in figures:
        share = rate / _number(figures, f"replay_tok_s_b{batch}")
        found[f"{kind}_over_replay_b{batch}"] = round(share, 4)
    return found


def _number(figures: Figures, name: str) -> float:
    value = figures[name]
    assert isinstance(value, int | float)
    return value


class StepBench:
    """Measures all batch sizes on one executor, one after the other."""

    def __init__(
        self,
        executor: TorchExecutor,
        device: Device,
        watch: Watch,
        *,
        setting: Setting,
        model_dir: Path,
    ) -> None:
        self._executor = executor
        self._device = device
        self._watch = watch
        self._setting = setting
        self._driver = StepDriver(executor)
        self._windows = TokenWindows(load_numeric_tokenizer(model_dir), seed=0)

    async def run(self) -> Figures:
        figures: Figures = {"about": self._executor.about}
        async with running(self._executor):
            for batch in self._setting.sizes.batches:
                figures |= await self._figures(batch)
                self._setting.keep(figures)
        return figures

    async def _figures(self, batch: int) -> Figures:
        sizes = self._setting.sizes
        shape = Shape(batch, sizes.input_len, sizes.output_len)
        await self._warm_up(shape)
        steps_s = [summarize(await self._times(shape)).step_s for _ in range(sizes.repeats)]
        figures: Figures = {
            f"executor_spread_b{batch}": round(spread(steps_s), 3),
            f"replayed_share_b{batch}": round(self._watch.num_replays / sizes.num_decodes, 3),
        }
        figures |= self._idle(await self._times(shape), batch)
        await self._times(dataclasses.replace(shape, output_len=sizes.output_len // 2))
        figures |= self._replay(batch)
        return figures | _over_replay("executor", batch / median(steps_s), figures, batch)

    async def _warm_up(self, shape: Shape) -> None:
        """Repeats the run until nothing is compiled and all its decode steps are replayed. Graphs
        are captured when no step waits.
        """
        for _ in range(MAX_WARM_UPS):
            await self._times(shape)
            if self._watch.num_replays >= self._setting.sizes.num_decodes:
                return

    async def _times(self, shape: Shape) -> list[StepTime]:
        self._watch.clear()
        return await self._driver.run(requests_of(shape, self._windows))

    def _idle(self, times: list[StepTime], batch: int) -> Figures:
        """Returns the device's idle time between two decode steps, of which the second was launched
        before the first had a result, so that work was waiting.
        """
        gaps_us = [
            gap_us
            for before, after, gap_us in zip(times, times[1:], self._watch.gaps_us(), strict=False)
            if not before.stats.num_prefill_tokens
            and not after.stats.num_prefill_tokens
            and after.launched_s < before.done_s
        ]
        if not gaps_us:
            return {}
        return {
            f"idle_us_b{batch}": round(median(gaps_us), 2),
            f"idle_p99_us_b{batch}": round(percentile(gaps_us, 99), 2),
        }

    def _replay(self, batch: int) -> Figures:
        """Replays the last step, which has all rows, on the executor's stream while that is idle.
        Each replay reads and writes the same memory.
        """
        captured, num = self._watch.last, self._setting.sizes.replays
        if captured is None:
            return {}

        def replays() -> None:
            for _ in range(num):
                captured.replay(lambda _values: None)

        with torch.inference_mode(), self._device.stream():
            replay_s = median(times_s(replays, self._device.torch_device)) / num
        return {f"replay_tok_s_b{batch}": round(batch / replay_s, 1)}
