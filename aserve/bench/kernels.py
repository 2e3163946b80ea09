"""`aserve bench kernels` measures the memory bandwidth of each Triton kernel relative to a plain
copy in the same run.

Without a CUDA device it reports why, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aserve.bench.device_rates import copy_rate, times_s
from aserve.bench.options import KernelsOptions
from aserve.bench.result import BenchResult, Figures, Table, median, progress
from aserve.config import Resolved
from aserve.gpu.device.cuda.device import why_no_cuda

TITLE = "kernels and a plain copy"
COLUMNS = ("kernel", "us", "GB/s", "share of copy")
COPY_BYTES = 2 << 30
NOTE = (
    "GB/s: the least bytes to read and write, divided by the median time. sample, limits: with "
    "noise, top-k 20 and top-p 0.95, for which the kernel reads the logits twice."
)


def run(options: KernelsOptions, _resolved: Resolved) -> BenchResult:
    if not torch.cuda.is_available():
        reason = f"no CUDA: {why_no_cuda()}"
        return BenchResult({"kernels": {}, "not_run": reason}, (), (f"not run: {reason}",))
    return measure(options, torch.device("cuda"), copy_bytes=COPY_BYTES)


def measure(options: KernelsOptions, device: torch.device, *, copy_bytes: int) -> BenchResult:
    from aserve.bench.kernel_cases import CASES, Sizes

    sizes = Sizes(options.tokens, options.rows, options.context_len)
    copy = copy_rate(copy_bytes, device)
    figures: dict[str, Mapping[str, float]] = {}
    with progress(TITLE, len(CASES)) as done:
        for name, make in CASES.items():
            case = make(sizes, device)
            time_s = median(times_s(case.work, device))
            rate = case.num_bytes / time_s
            figures[name] = {
                "us": round(time_s * 1e6, 1),
                "gb_per_s": round(rate / 1e9, 1),
                "of_copy": round(rate / copy, 3),
            }
            done()
    found: Figures = {"kernels": figures, "copy_gb_per_s": round(copy / 1e9, 1)}
    return BenchResult(found, (_table(figures),), (f"copy: {copy / 1e9:,.0f} GB/s. {NOTE}",))


def _table(figures: Mapping[str, Mapping[str, float]]) -> Table:
    rows = [
        [name, f"{one['us']:,.1f}", f"{one['gb_per_s']:,.0f}", f"{one['of_copy']:.0%}"]
        for name, one in figures.items()
    ]
    return Table(TITLE, COLUMNS, rows)
