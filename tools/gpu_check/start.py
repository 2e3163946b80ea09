"""Measures the time until `aserve serve` is ready, and its memory then: with random weights, with
all graphs captured at the start, and with the bundled model.
"""

from __future__ import annotations

import asyncio

from aserve.bench.result import median
from aserve.bench.server_start import start_server
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting, command_line


def measure(setting: Setting, _argument: str) -> Figures:
    sizes = setting.sizes
    max_len = sizes.input_len + sizes.output_len
    flags = setting.flags(sizes.small, num_rows=sizes.most_rows, max_len=max_len)
    flags["cuda_graph_capture"] = "lazy"
    starts = [asyncio.run(start_server(*command_line(flags))) for _ in range(sizes.repeats)]
    bundled = asyncio.run(start_server(*command_line(setting.device_flags)))
    figures: Figures = {
        "ready_s": round(median([start.ready_s for start in starts]), 3),
        "first_ready_s": round(starts[0].ready_s, 3),
        "memory_gb": round(starts[-1].memory_bytes / 1e9, 3),
        "bundled_ready_s": round(bundled.ready_s, 3),
    }
    setting.keep(figures)
    eager = flags | {"cuda_graph_capture": "eager"}
    captured = asyncio.run(start_server(*command_line(eager)))
    return figures | {"captured_ready_s": round(captured.ready_s, 3)}
