"""`aserve bench offline` measures the embedded engine, alone or alternating with another engine.

By default it runs a load of requests and reports the figures of `serve`. A preset or `--beside`
measures batches instead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from aserve.bench.batch_times import PEERS, WARM_UP_LEN, Generate, Scenario
from aserve.bench.batches import OURS, batch_result, measure_batches
from aserve.bench.compared_engines import TransformersEngine, time_request
from aserve.bench.load import arrival_times, run_load
from aserve.bench.options import OfflineOptions
from aserve.bench.result import BenchResult, progress, spread
from aserve.bench.serving_figures import figures_table, medians_of, serving_figures
from aserve.bench.streamed import Answer
from aserve.bench.windows import TokenWindows
from aserve.config import Resolved
from aserve.engine import Engine
from aserve.errors import ConfigError
from aserve.host.hub import resolve_model_dir
from aserve.host.threads import in_thread, new_event_loop
from aserve.load import load


def run(options: OfflineOptions, resolved: Resolved) -> BenchResult:
    kv = dataclasses.replace(resolved.kv, no_prefix_cache=not options.prefix_cache)
    model = dataclasses.replace(resolved.model, generation_config="none")  # plain greedy
    resolved = dataclasses.replace(resolved, kv=kv, model=model)
    scenarios = _scenarios(options)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_measure(options, resolved, scenarios=scenarios))


async def _measure(
    options: OfflineOptions, resolved: Resolved, *, scenarios: list[Scenario]
) -> BenchResult:
    loaded = await in_thread(functools.partial(load, resolved), name="load")
    _check_context(scenarios, max_model_len=loaded.executor.spec.max_model_len)
    windows = TokenWindows(loaded.text.tokenizer, seed=options.prompt_seed)
    async with Engine(resolved, loader=lambda _: loaded) as engine:
        ours = OurEngine(engine, root_len=loaded.executor.spec.decode.root_len)
        if options.preset or options.beside:
            with ThreadPoolExecutor(1) as thread:
                engines = await _open_engines(ours, options, resolved, thread=thread)
                found = await measure_batches(scenarios, engines, windows, repeats=options.repeats)
            result = batch_result(found, beside=options.beside)
        else:
            result = _load_result(await _measure_load(ours, windows, options))
    engine_about = loaded.executor.about
    figures = {"cached_tokens": ours.num_cached, "engine": engine_about, "settings": options}
    about = f"{resolved.model_name}: {engine_about}; cached prompt tokens: {ours.num_cached}"
    return BenchResult({**result.figures, **figures}, result.tables, (about, *result.notes))


class OurEngine:
    """The embedded engine, with a count of the prompt tokens that its prefix cache had. `root_len`:
    tokens that the step of a prompt gives, which is no decode.
    """

    def __init__(self, engine: Engine, *, root_len: int = 1) -> None:
        self.num_cached = 0
        self.root_len = root_len
        self._engine = engine

    @property
    def num_decodes(self) -> int:
        return self._engine.num_decodes

    async def send(self, prompt: list[int], num_new: int) -> Answer:
        answer = await time_request(self._engine, prompt, max_tokens=num_new)
        self.num_cached += answer.cached_tokens
        return answer

    async def generate(self, prompts: Sequence[list[int]], num_new: int) -> int:
        """Sends all prompts at once, and returns the number of tokens. Raises the first error."""
        answers = await asyncio.gather(*(self.send(prompt, num_new) for prompt in prompts))
        return sum(answer.completion_tokens for answer in answers)


async def _open_engines(
    ours: OurEngine, options: OfflineOptions, resolved: Resolved, *, thread: ThreadPoolExecutor
) -> dict[str, Generate]:
    """Opens the engines. NOTE: the other engine uses one thread for everything, because torch
    keeps a pool of worker threads for each calling thread.
    """
    if not options.beside:
        return {OURS: ours.generate}
    loop = asyncio.get_running_loop()
    open_engine = functools.partial(
        TransformersEngine,
        resolve_model_dir(resolved.model_source),
        dtype=options.beside_dtype,
        is_dummy=resolved.model.load_format == "dummy",
    )
    beside = await loop.run_in_executor(thread, open_engine)

    async def generate(prompts: Sequence[list[int]], num_new: int) -> int:
        return await loop.run_in_executor(thread, beside.generate, prompts, num_new)

    return {OURS: ours.generate, options.beside: generate}


async def _measure_load(
    ours: OurEngine, windows: TokenWindows, options: OfflineOptions
) -> list[dict[str, float]]:
    """Returns the figures of each repeat."""
    figures = []
    with progress("requests", options.repeats * options.num_prompts) as done:
        await ours.generate([windows.ids(options.input_len)], WARM_UP_LEN)
        for repeat in range(options.repeats):
            sends = [
                functools.partial(ours.send, windows.ids(options.input_len), options.output_len)
                for _ in range(options.num_prompts)
            ]
            arrivals_s = arrival_times(
                options.num_prompts, rate=options.request_rate, burstiness=1.0, seed=repeat
            )
            num_decodes = ours.num_decodes
            answers, duration_s = await run_load(
                sends, arrivals_s, max_concurrency=options.max_concurrency, done=done
            )
            one = serving_figures(answers, duration_s=duration_s, limits_ms={})
            num_tokens = one["total_output_tokens"] - ours.root_len * one["completed"]
            # One token without drafts, more with them, and those of a diffusion model's forward.
            rate = num_tokens / max(1, ours.num_decodes - num_decodes)
            figures.append({**one, "tokens_per_decode": round(rate, 3)})
    return figures


def _load_result(figures: list[dict[str, float]]) -> BenchResult:
    medians = medians_of(figures)
    rates = [one["output_throughput"] for one in figures]
    table = figures_table(f"embedded engine, medians of {len(figures)} repeats", medians)
    return BenchResult({**medians, "spread": round(spread(rates), 3), "runs": figures}, (table,))


def _check_context(scenarios: list[Scenario], *, max_model_len: int) -> None:
    """Raises if a scenario does not fit in the model's context."""
    for scenario in scenarios:
        num_tokens = scenario.input_len + scenario.output_len
        if num_tokens > max_model_len:
            raise ConfigError(
                f"{scenario.name} needs {num_tokens} tokens, but the model's context has "
                f"{max_model_len}: choose shorter lengths, or another --scenario"
            )


def _scenarios(options: OfflineOptions) -> list[Scenario]:
    if not options.preset:
        if options.scenario:
            raise ConfigError(
                f"--scenario {options.scenario}: it chooses from a preset, so give --preset as well"
            )
        return [Scenario("batch", options.num_prompts, options.input_len, options.output_len)]
    known = {scenario.name: scenario for scenario in PEERS}
    names = options.scenario.split(",") if options.scenario else list(known)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--scenario {unknown[0]}: must be among {', '.join(known)}")
    return [known[name] for name in names]
