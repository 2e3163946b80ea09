"""The command line of `make gpu-check`, which works like that of `aserve bench`."""

from __future__ import annotations

from collections.abc import Sequence

from aserve.bench.catalog import Bench
from aserve.cli import main
from tools.gpu_check import check
from tools.gpu_check.options import GpuCheckOptions

NAME = "gpu-check"
BENCHES = {
    NAME: Bench(
        "Run the tests and measurements that need a GPU, and compare them with their goals.",
        GpuCheckOptions,
        check.__name__,
    )
}


def run_command(arguments: Sequence[str]) -> int:
    """Runs the parts and returns the exit code, as `aserve bench` does."""
    return main(["bench", NAME, *arguments], benches=BENCHES)
