"""Lists the benches by name and runs one of them.

This module must import quickly, so a bench's own imports happen when it runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from aserve.bench.options import (
    AdmissionOptions,
    FairnessOptions,
    HostileOptions,
    HostStepOptions,
    KernelsOptions,
    OfflineOptions,
    OneBatchOptions,
    OverlapSimOptions,
    RelayOptions,
    ReportOptions,
    ScalingOptions,
    ServeOptions,
)
from aserve.config import Resolved
from aserve.host.environment import prepare_process


@dataclass(frozen=True, slots=True)
class Bench:
    """`module` has `run(options, resolved) -> BenchResult`; with `takes_engine` the command has the
    engine's options, too.
    """

    about: str
    options: type
    module: str
    takes_engine: bool = False


BENCHES: Mapping[str, Bench] = {
    "admission": Bench(
        "The longest scheduler step under the heaviest loads; the device takes no time.",
        AdmissionOptions,
        "aserve.bench.admission",
    ),
    "fairness": Bench(
        "How much one client's flood delays others, with a device that only sleeps.",
        FairnessOptions,
        "aserve.bench.fairness",
    ),
    "host-step": Bench(
        "The scheduler's time per step, with a device that takes no time.",
        HostStepOptions,
        "aserve.bench.host_step",
    ),
    "hostile": Bench(
        "Delay of the event loop, /health and memory, while hostile bodies are sent.",
        HostileOptions,
        "aserve.bench.hostile",
    ),
    "kernels": Bench(
        "How near each Triton kernel comes to the bandwidth of the device's memory.",
        KernelsOptions,
        "aserve.bench.kernels",
    ),
    "offline": Bench(
        "A load of requests through the embedded engine, alone or in turns with another engine.",
        OfflineOptions,
        "aserve.bench.offline",
        takes_engine=True,
    ),
    "one-batch": Bench(
        "Prefill and decode of one batch by the executor, beside the machine's limits.",
        OneBatchOptions,
        "aserve.bench.one_batch",
        takes_engine=True,
    ),
    "overlap-sim": Bench(
        "How busy the host keeps a device that only sleeps.",
        OverlapSimOptions,
        "aserve.bench.overlap_sim",
    ),
    "relay": Bench(
        "From a step's event on the device to the token that the loop awaits.",
        RelayOptions,
        "aserve.bench.relay",
    ),
    "report": Bench(
        "Draw the figures of `scaling`, or of a comparison of engines.",
        ReportOptions,
        "aserve.bench.report",
    ),
    "scaling": Bench(
        "How cost grows: with context, prompt, rows and the size of the model.",
        ScalingOptions,
        "aserve.bench.scaling",
        takes_engine=True,
    ),
    "serve": Bench(
        "A load of streamed requests to any OpenAI-compatible server.",
        ServeOptions,
        "aserve.bench.serve",
    ),
}


def run_bench(name: str, bench: Bench, options: object, resolved: Resolved) -> None:
    """Measures, and shows what was found. NOTE: modules of benches import torch, so the process is
    prepared before, as a server's is.
    """
    prepare_process(resolved.machine.threads)
    from aserve.bench.machine import read_machine
    from aserve.bench.result import show

    module = importlib.import_module(bench.module)
    show(name, module.run(options, resolved), read_machine())
