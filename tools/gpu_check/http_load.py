"""Measures `aserve serve` with as many streaming clients as rows, in a process of their own,
relative to the embedded engine with the same requests.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from aserve.bench.batch_times import Scenario
from aserve.bench.server_start import serving
from tools.gpu_check.embedded_rate import embedded_rates
from tools.gpu_check.other_bench import run_bench
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting, command_line, resolved_of


def measure(setting: Setting, _argument: str) -> Figures:
    sizes = setting.sizes
    max_len = sizes.input_len + sizes.output_len + SLACK
    flags = setting.flags(sizes.small, num_rows=sizes.most_rows, max_len=max_len)
    load = Scenario("http", sizes.most_rows, sizes.input_len, sizes.output_len)
    over_http = asyncio.run(_ask_server(flags, load, repeats=sizes.repeats))
    http_tok_s = over_http["output_throughput"]
    setting.keep({"http": over_http})
    engine = embedded_rates([load], resolved_of(flags), repeats=sizes.repeats)[load]
    engine_tok_s = engine["out_tok_s"]
    assert isinstance(http_tok_s, float)
    return {
        "http_tok_s": round(http_tok_s, 1),
        "engine_tok_s": engine_tok_s,
        "http_over_engine": round(http_tok_s / engine_tok_s, 4),
        "http": over_http,
        "engine": engine,
    }


SLACK = 16  # tokens by which a prompt may grow when it is sent as text


async def _ask_server(flags: dict[str, object], load: Scenario, *, repeats: int) -> Figures:
    """Returns the figures of `aserve bench serve`, without its warm-up."""
    clients = str(load.num_prompts)
    async with serving(*command_line(flags)) as start:
        return await asyncio.to_thread(
            run_bench,
            "serve",
            *("--url", start.address, "--tokenizer", str(Path(str(flags["model"])).parent)),
            *("--num-prompts", clients, "--max-concurrency", clients, "--num-warmups", clients),
            *("--input-len", str(load.input_len), "--output-len", str(load.output_len)),
            *("--repeats", str(repeats), "--server-pid", str(start.pid)),
        )
