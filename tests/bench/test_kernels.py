"""`aserve bench kernels`: what is measured with CUDA, and what is said without."""

from __future__ import annotations

import pytest
import torch

from aserve.bench import kernel_cases
from aserve.bench.kernels import measure, run
from aserve.bench.options import KernelsOptions
from aserve.config import Facts, Raw, resolve
from tests.bench.last_line import Captured, figures_of

CPU = torch.device("cpu")
SMALL = {"hidden": 64, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 100}


def test_without_cuda_the_last_line_says_that_nothing_was_measured(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    figures = figures_of(capsys, "kernels")
    assert figures["kernels"] == {}
    assert figures["not_run"].startswith("no CUDA: ")


def test_every_kernel_is_compared_with_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: the figures are those of the CPU, and mean nothing."""
    sizes = kernel_cases.Sizes
    monkeypatch.setattr(kernel_cases, "Sizes", lambda *given: sizes(*given, **SMALL))
    monkeypatch.setattr("aserve.bench.device_rates.TRIES", 1)
    monkeypatch.setattr("aserve.bench.device_rates.WARM_UPS", 0)
    options = KernelsOptions(tokens=3, rows=2, context_len=20)
    result = measure(options, CPU, copy_bytes=1 << 20)
    figures = result.figures["kernels"]
    assert isinstance(figures, dict)
    assert list(figures) == list(kernel_cases.CASES)
    for one in figures.values():
        assert list(one) == ["us", "gb_per_s", "of_copy"]
        assert one["us"] > 0
    (table,) = result.tables
    assert [row[0] for row in table.rows] == list(figures)


@pytest.mark.gpu
def test_kernels_are_measured_on_the_device() -> None:
    resolved = resolve(Raw(command_line={}), Facts(default_model="none"))
    figures = run(KernelsOptions(tokens=4096, rows=64), resolved).figures
    assert set(figures) == {"kernels", "copy_gb_per_s"}
