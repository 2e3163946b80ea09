"""Checks ranks on GPUs: the bundled model in float32 on ranks against one engine without them.

- `one` has a single rank that goes the way of ranks: NCCL, its sums within captured graphs, the
  watch of the waits. It needs one GPU.
- `two` has two ranks, each a process with a GPU. It also measures the decode rate of the small
  model over that of one GPU.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aserve.bench.batch_times import Scenario
from aserve.bench.step_driver import StepDriver, running
from aserve.engine_core import LocalExecutor
from aserve.gpu.build import BuildOptions, build_on
from aserve.gpu.device.base import Device
from aserve.gpu.device.ranks import JoinOptions, rank_backend
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.parallel.collectives import Collectives, GroupCollectives
from aserve.host.threads import new_event_loop
from aserve.load import load_executor
from aserve.messages.requests import AdmitRequest
from aserve.parallel.topology import Coordinates, Patience
from aserve.tiny import MODEL_DIR
from tools.gpu_check.embedded_rate import embedded_rates
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting, resolved_of
from tools.gpu_check.speculation import EXPECTED, Expected

TWO = "two"


def measure(setting: Setting, which: str) -> Figures:
    expected = msgspec.json.decode(EXPECTED.read_bytes(), type=Expected)
    requests = expected.requests(setting.sizes.num_prompts)
    plain = _alone(setting, is_rank=False)
    ours = _on_two(setting) if which == TWO else _alone(setting, is_rank=True)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        found = [runner.run(_outputs(executor, requests)) for executor in (plain, ours)]
    pairs = zip(*found, strict=True)
    figures: Figures = {
        "about": ours.about,
        "equal_outputs": sum(first == second for first, second in pairs) / len(requests),
    }
    if which != TWO or setting.device == "cpu":
        return figures
    setting.keep(figures)
    return figures | {"gain": _gain(setting)}


def _alone(setting: Setting, *, is_rank: bool) -> TorchExecutor:
    device = setting.open_device()
    if setting.device == "cpu":
        device.graph_rows = 0  # sums of a dry run cannot be recorded
    options = BuildOptions(MODEL_DIR, dtype="float32", max_rows=1, num_pages=80, prefix_cache=False)
    if is_rank:
        ranks = _joined(device, setting.folder / "store", is_dry=setting.device == "cpu")
        options = dataclasses.replace(options, ranks=ranks)
    executor = build_on(device, setting.for_steps(options))
    executor.capture_graphs(lambda _done, _total: None)
    return executor


def _joined(device: Device, store: Path, *, is_dry: bool) -> Collectives:
    """The collectives of one rank, by the backend of the device."""
    place, patience = Coordinates(store=str(store)), Patience()
    if is_dry:
        return GroupCollectives(place, patience)
    return rank_backend(device).join(device, place, patience, JoinOptions())


def _on_two(setting: Setting) -> LocalExecutor:
    flags = {
        **setting.device_flags,
        "dtype": "float64" if setting.device == "cpu" else "float32",
        "attention_backend": "torch-ref" if setting.device == "cpu" else "auto",
        "max_num_seqs": 1,
        "num_pages": 80,
        "tensor_parallel_size": 2,
    }
    return load_executor(resolved_of(flags), MODEL_DIR)


async def _outputs(executor: LocalExecutor, requests: Sequence[AdmitRequest]) -> list[list[int]]:
    driver = StepDriver(executor)
    async with running(executor):
        await driver.run(requests)
    return [driver.outputs[request.request_id] for request in requests]


def _gain(setting: Setting) -> float:
    """Returns the decode rate of two ranks over that of one GPU."""
    sizes = setting.sizes
    max_len = sizes.input_len + sizes.output_len
    flags = setting.flags(sizes.small, num_rows=sizes.most_rows, max_len=max_len)
    load = Scenario("ranks", sizes.most_rows, sizes.input_len, sizes.output_len)
    rates = []
    for num_ranks in (2, 1):
        resolved = resolved_of(flags | {"tensor_parallel_size": num_ranks})
        found = embedded_rates([load], resolved, repeats=sizes.repeats)[load]
        rates.append(found["decode_tok_s"])
    return round(rates[0] / rates[1], 4)
