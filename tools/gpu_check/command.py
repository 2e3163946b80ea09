"""The command line of `make gpu-check`, which runs like one of `aserve bench`."""

from __future__ import annotations

from collections.abc import Sequence

from aserve.bench.catalog import Bench
from aserve.cli import main
from tools.gpu_check import check
from tools.gpu_check.options import GpuCheckOptions

NAME = "gpu-check"
BENCHES = {
    NAME: Bench(
        "What only a GPU can show, in parts that can be resumed, beside its goals.",
        GpuCheckOptions,
        check.__name__,
    )
}


def run_command(arguments: Sequence[str]) -> int:
    """Runs the parts and returns the exit code, as `aserve bench` does."""
    return main(["bench", NAME, *arguments], benches=BENCHES)
