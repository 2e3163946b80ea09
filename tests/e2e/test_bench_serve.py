"""`aserve bench serve` counts what the server counts."""

from __future__ import annotations

import pytest

from tests.bench.last_line import Captured, figures_of
from tests.e2e.server_process import ServerProcess

COUNTERS = ("requests_received", "prompt_tokens", "generation_tokens", "cached_tokens")


def counters(server: ServerProcess) -> dict[str, float]:
    return {name: server.metric(f"aserve_{name}_total ") for name in COUNTERS}


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
