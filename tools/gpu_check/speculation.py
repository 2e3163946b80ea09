"""Compares a bundled drafter with plain decoding of the bundled model, in float32, row by row:

- the part of the prompts whose outputs are equal, token for token;
- the verify steps, relative to those that expected_acceptance.json has from plain PyTorch;
- the part of the decode steps that are replays of graphs;
- the rate of decoding relative to that of the plain engine, and the cost of a step with drafts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from aserve.bench.result import median
from aserve.bench.speculate_engine import Run, summarize
from aserve.bench.step_driver import StepDriver, StepTime, running
from aserve.gpu.build import BuildOptions, build_on
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.spec.request import SpecOptions
from aserve.host.threads import new_event_loop
from aserve.messages.base import pack_i32
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting
from tools.gpu_check.watch import Watch, watched

EXPECTED = DRAFTERS_DIR / "expected_acceptance.json"
# The bundled drafter of each algorithm that has one.
BUNDLED: Mapping[str, str] = {
    "DFLASH": "dflash",
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "FROZEN_KV_MTP": "frozen_kv",
    "NEXTN": "mtp",
    "STANDALONE": "small_lm",
}


class Chains(msgspec.Struct, frozen=True):
    """The figures of a drafter that makes chains of one length."""

    num_drafts: int
    verifies_by_prompt: tuple[int, ...]


class Expected(msgspec.Struct, frozen=True):
    """The content of expected_acceptance.json."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    prompts: tuple[list[int], ...]
    drafters: dict[str, tuple[Chains, ...]]

    def requests(self, num_prompts: int) -> list[AdmitRequest]:
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=self.max_tokens + 1)
        return [
            AdmitRequest(f"{number}", pack_i32(prompt), sampling, end_ids=self.stop_ids)
            for number, prompt in enumerate(self.prompts[:num_prompts])
        ]


@dataclass(frozen=True, slots=True)
class Engine:
    executor: TorchExecutor
    watch: Watch


@dataclass(frozen=True, slots=True)
class Decoding:
    """What one engine made of all prompts."""

    outputs: list[list[int]]
    runs: list[Run]
    num_verifies: int
    replayed_share: float


def measure(setting: Setting, algorithm: str) -> Figures:
    expected = msgspec.json.decode(EXPECTED.read_bytes(), type=Expected)
    requests = expected.requests(setting.sizes.num_prompts)
    engines = [_engine(setting, name) for name in (None, algorithm)]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        plain, ours = [runner.run(_decode(engine, requests)) for engine in engines]
    pairs = zip(ours.outputs, plain.outputs, strict=True)
    figures: Figures = {
        "about": engines[1].executor.about,
        "equal_outputs": sum(first == second for first, second in pairs) / len(requests),
        "replayed_share": round(ours.replayed_share, 3),
        "gain_b1": round(_rate(ours.runs) / _rate(plain.runs), 3),
        "step_cost_b1": round(_step_s(ours.runs) / _step_s(plain.runs), 3),
    }
    num_drafts = engines[1].executor.spec.decode.max_tokens_per_step - 1
    for chains in expected.drafters.get(BUNDLED.get(algorithm, ""), ()):
        if chains.num_drafts == num_drafts:
            wanted = sum(chains.verifies_by_prompt[: len(requests)])
            figures["acceptance_error"] = round(abs(ours.num_verifies / wanted - 1), 4)
    return figures


def _engine(setting: Setting, algorithm: str | None) -> Engine:
    device, watch = watched(setting.open_device())
    if setting.device == "cpu":
        device.graph_rows = 0  # the look-ups of compiled CPU kernels cannot be recorded
    speculative = None
    if algorithm is not None:
        speculative = SpecOptions(algorithm, bundled_drafters=DRAFTERS_DIR)
    options = BuildOptions(
        MODEL_DIR,
        dtype="float32",
        max_rows=1,
        num_pages=80,
        depth=1,
        lead=1,
        prefix_cache=False,
        speculative=speculative,
    )
    executor = build_on(device, setting.for_steps(options))
    executor.capture_graphs(lambda _done, _total: None)
    return Engine(executor, watch)


async def _decode(engine: Engine, requests: Sequence[AdmitRequest]) -> Decoding:
    """The first prompt runs once more before the others, to warm up."""
    driver = StepDriver(engine.executor)
    outputs: list[list[int]] = []
    runs: list[Run] = []
    num_verifies = num_decodes = 0
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running(engine.executor))
        await driver.run(requests[:1])
        engine.watch.clear()
        for request in requests:
            times = await driver.run([request])
            outputs.append(driver.outputs[request.request_id])
            runs.append(summarize(times))
            decodes = _decodes(times)
            num_decodes += len(decodes)
            num_verifies += sum(each.num_tokens > 0 for each in decodes)
    replayed_share = engine.watch.num_replays / max(num_decodes, 1)
    return Decoding(outputs, runs, num_verifies, replayed_share)


def _decodes(times: Sequence[StepTime]) -> list[StepTime]:
    return [each for each in times if not each.stats.num_prefill_tokens]


def _rate(runs: Sequence[Run]) -> float:
    return sum(each.num_tokens for each in runs) / sum(each.decode_s for each in runs)


def _step_s(runs: Sequence[Run]) -> float:
    return median([each.step_s for each in runs])
