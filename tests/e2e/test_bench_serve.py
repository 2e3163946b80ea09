"""`aserve bench serve` counts what the server counts."""

from __future__ import annotations

import re

import pytest

from tests.bench.last_line import Captured, figures_of
from tests.e2e.server_process import ServerProcess

COUNTERS = ("requests_received", "prompt_tokens", "generation_tokens", "cached_tokens")
TIMES = ("ttft", "tpot", "itl", "e2el")


def counters(server: ServerProcess) -> dict[str, float]:
    text = server.get("/metrics").decode()
    found = {}
    for name in COUNTERS:
        line = re.search(rf"^aserve_{name}_total (\S+)$", text, re.MULTILINE)
        assert line is not None, name
        found[name] = float(line[1])
    return found


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_its_counts_are_those_of_the_servers_metrics(
    endpoint: str, server: ServerProcess, capsys: Captured
) -> None:
    before = counters(server)
    load = ("--num-prompts", "6", "--input-len", "40", "--output-len", "5", "--repeats", "2")
    figures = figures_of(
        capsys,
        *("serve", "--url", server.address, "--endpoint", endpoint, "--num-warmups", "0"),
        *(*load, "--server-pid", str(server.process.pid), "--goodput", "e2el:60000"),
    )
    after = counters(server)
    counted = {name: after[name] - before[name] for name in COUNTERS}
    runs = figures["runs"]
    assert counted["requests_received"] == sum(run["completed"] for run in runs) == 12
    assert counted["generation_tokens"] == sum(run["total_output_tokens"] for run in runs) == 60
    assert counted["prompt_tokens"] == sum(run["total_input_tokens"] for run in runs)
    assert counted["cached_tokens"] == sum(run["total_cached_tokens"] for run in runs)
    assert [run["failed"] for run in runs] == [0, 0]
    assert figures["request_goodput"] == figures["request_throughput"]
    assert figures["server_cpu_s_per_1k_tok"] >= 0
    assert (figures["model_id"], figures["num_prompts"]) == ("aserve-tiny", 6)
    assert figures["request_rate"] == "inf"
    assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "p99") for name in TIMES} <= set(
        figures
    )


def test_prompts_share_nothing_but_the_prefix_that_was_asked_for(
    server: ServerProcess, capsys: Captured
) -> None:
    load = ("serve", "--url", server.address, "--num-prompts", "8", "--output-len", "2")
    alone = ("--max-concurrency", "1", "--num-warmups", "1", "--repeats", "1")
    assert figures_of(capsys, *load, *alone, "--seed", "5")["total_cached_tokens"] == 0
    shared = figures_of(capsys, *load, *alone, "--shared-prefix-len", "40", "--seed", "6")
    assert shared["total_cached_tokens"] == 8 * 32  # whole pages of 16
