"""Lists the benchmarks by name and runs one of them.

This module must import quickly, so the imports of a benchmark happen when it runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from aserve.bench.options import (
    AdmissionOptions,
    ClusterSimOptions,
    DisaggBenchOptions,
    FairnessOptions,
    GroupedOptions,
    HostileOptions,
    HostStepOptions,
    HttpCostOptions,
    KernelsOptions,
    LoraBenchOptions,
    OfflineOptions,
    OneBatchOptions,
    OverlapSimOptions,
    ParallelOptions,
    RelayOptions,
    ReportOptions,
    RequestMemoryOptions,
    RouteOptions,
    ScalingOptions,
    ServeOptions,
    SpeculateOptions,
    TwoBatchesOptions,
    VerifyOptions,
)
from aserve.config import Resolved
from aserve.host.environment import prepare_process


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark. `module` has `run(options, resolved) -> BenchResult`. With `takes_engine` the
    command also has the engine's options.
    """

    about: str
    options: type
    module: str
    takes_engine: bool = False


BENCHES: Mapping[str, Bench] = {
    "admission": Bench(
        "The scheduler's CPU time per tick under the heaviest loads. The device takes no time.",
        AdmissionOptions,
        "aserve.bench.admission",
    ),
    "cluster-sim": Bench(
        "Clusters of up to 512 devices in virtual time, with real schedulers and balancers.",
        ClusterSimOptions,
        "aserve.bench.cluster_sim",
    ),
    "disagg": Bench(
        "Prefill and decode in two servers beside one: added TTFT, transfer rates, regularity.",
        DisaggBenchOptions,
        "aserve.bench.disagg",
    ),
    "fairness": Bench(
        "The delay that a flood from one client causes to others. The device only sleeps.",
        FairnessOptions,
        "aserve.bench.fairness",
    ),
    "grouped": Bench(
        "Grouped products of a mixture of experts, relative to a loop of torch over the experts.",
        GroupedOptions,
        "aserve.bench.grouped",
    ),
    "host-step": Bench(
        "The scheduler's time per step. The device takes no time.",
        HostStepOptions,
        "aserve.bench.host_step",
    ),
    "hostile": Bench(
        "Delay of the event loop and /health, and memory, while hostile bodies are sent.",
        HostileOptions,
        "aserve.bench.hostile",
    ),
    "http-cost": Bench(
        "The CPU time of a token over HTTP, and /health meanwhile. The device only sleeps.",
        HttpCostOptions,
        "aserve.bench.http_cost",
    ),
    "kernels": Bench(
        "The memory bandwidth of each Triton kernel, relative to a plain copy.",
        KernelsOptions,
        "aserve.bench.kernels",
    ),
    "lora": Bench(
        "Decode steps of rows with different LoRA adapters, relative to rows without.",
        LoraBenchOptions,
        "aserve.bench.lora",
        takes_engine=True,
    ),
    "offline": Bench(
        "Throughput of the embedded engine, alone or alternating with another engine.",
        OfflineOptions,
        "aserve.bench.offline",
        takes_engine=True,
    ),
    "one-batch": Bench(
        "Prefill and decode of one batch by the executor, relative to the machine's limits.",
        OneBatchOptions,
        "aserve.bench.one_batch",
        takes_engine=True,
    ),
    "overlap-sim": Bench(
        "The share of time in which the host keeps the device busy. The device only sleeps.",
        OverlapSimOptions,
        "aserve.bench.overlap_sim",
    ),
    "parallel": Bench(
        "Decoding by ranks, and by stages, relative to one process with as many threads.",
        ParallelOptions,
        "aserve.bench.parallel",
        takes_engine=True,
    ),
    "relay": Bench(
        "The time from a step's event on the device to its awaited token on the loop.",
        RelayOptions,
        "aserve.bench.relay",
    ),
    "report": Bench(
        "Draws the figures of `scaling`, or of a comparison of engines.",
        ReportOptions,
        "aserve.bench.report",
    ),
    "request-memory": Bench(
        "The host memory of requests that run and that wait. The device only sleeps.",
        RequestMemoryOptions,
        "aserve.bench.request_memory",
    ),
    "route": Bench(
        "The cost of the router, and cached prefixes by its policy on two servers.",
        RouteOptions,
        "aserve.bench.route",
    ),
    "scaling": Bench(
        "Cost by context length, prompt length, number of rows and size of the model.",
        ScalingOptions,
        "aserve.bench.scaling",
        takes_engine=True,
    ),
    "speculate": Bench(
        "Speculative decoding over plain decoding: acceptance, cost of a step, and gain.",
        SpeculateOptions,
        "aserve.bench.speculate",
        takes_engine=True,
    ),
    "serve": Bench(
        "Latency and throughput of any OpenAI-compatible server.",
        ServeOptions,
        "aserve.bench.serve",
    ),
    "two-batches": Bench(
        "Two-batch overlap on logical ranks of experts behind a simulated link.",
        TwoBatchesOptions,
        "aserve.bench.two_batches",
    ),
    "verify": Bench(
        "A step that verifies drafts, over a step of plain decoding by the same engine.",
        VerifyOptions,
        "aserve.bench.verify_step",
        takes_engine=True,
    ),
}


def run_bench(name: str, bench: Bench, options: object, resolved: Resolved) -> None:
    """Runs a benchmark and prints its result, which may be what there was before Ctrl-C. NOTE:
    benchmarks import torch, so the process must be prepared first.
    """
    prepare_process(resolved.machine.threads)
    from aserve.bench.machine import read_machine
    from aserve.bench.result import show
    from aserve.gpu.cudagraph.warmup import names_the_option

    module = importlib.import_module(bench.module)
    with names_the_option(f"bench {name} does not fit in memory; choose smaller numbers"):
        result = module.run(options, resolved)
    show(name, result, read_machine())
    if not result.is_whole:
        raise KeyboardInterrupt
