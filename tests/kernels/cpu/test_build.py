"""Kernels are compiled ahead in worker processes, which later processes profit from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aserve_kernels.cpu import build
from aserve_kernels.cpu.build import KernelBuildError, KernelVariant, build_kernels

VARIANTS = [KernelVariant("draw", "float32"), KernelVariant("rms_norm", "float32")]

BUILD = """
import sys
from tests.kernels.cpu.test_build import VARIANTS
from aserve_kernels.cpu.build import build_kernels, missing_kernels
missing = missing_kernels(VARIANTS)
if "build" in sys.argv:
    seen = []
    build_kernels(missing, num_processes=2, on_progress=lambda *step: seen.append(step))
    assert seen == [(done, len(missing)) for done in range(len(missing) + 1)], seen
    missing = missing_kernels(VARIANTS)
print(len(missing))
"""
USE = """
import logging
logging.basicConfig(level="INFO")
import torch
from aserve_kernels.cpu.rms_norm import compile_rms_norm, rms_norm
compile_rms_norm(torch.float32)
print(rms_norm(torch.ones(1, 1), torch.ones(1), 0.0)[0, 0])
"""


def ran(program: str, *arguments: str, cache: Path, **environment: str) -> tuple[str, str]:
    """What the program wrote to stdout and stderr."""
    given = {**os.environ, "PYTHONPATH": ":".join(sys.path), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, env=given | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_built_kernels_are_loaded_and_another_processor_builds_its_own(tmp_path: Path) -> None:
    assert ran(BUILD, cache=tmp_path)[0] == "2"
    assert ran(BUILD, "build", cache=tmp_path)[0] == "0"
    assert ran(BUILD, cache=tmp_path)[0] == "0"
    answer, log = ran(USE, cache=tmp_path)
    assert (answer, log) == ("tensor(1.)", "")  # nothing was compiled: that is logged
    other = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert ran(BUILD, cache=tmp_path, **other)[0] == "2"
    assert "compiling a kernel" in ran(USE, cache=tmp_path, **other)[1]


def test_where_no_code_is_kept_nothing_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve_kernels.cpu.build.config.CACHE_DIR", "")
    assert build.missing_kernels(VARIANTS) == []


def test_a_worker_that_ends_early_is_an_error_and_ends_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    steps: list[int] = []
    with pytest.raises(KernelBuildError, match="has ended"):
        build_kernels(VARIANTS, num_processes=2, on_progress=lambda done, _: steps.append(done))
    assert steps == [0]
