"""Kernels are compiled ahead in worker processes, which later processes profit from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aserve_kernels.cpu.build import KernelBuildError, KernelVariant, build_kernels

VARIANTS = [KernelVariant("draw", "float32"), KernelVariant("rms_norm", "float32")]

START = """
import logging
logging.basicConfig(level="INFO")
import torch
from tests.kernels.cpu.test_build import VARIANTS
from aserve_kernels.cpu.build import missing_kernels
from aserve_kernels.cpu.rms_norm import compile_rms_norm, rms_norm
"""
BUILD = """
from aserve_kernels.cpu.build import build_kernels
assert missing_kernels(VARIANTS) == VARIANTS
seen = []
build_kernels(VARIANTS, num_processes=2, on_progress=lambda *step: seen.append(step))
assert seen == [(0, 2), (1, 2), (2, 2)], seen
assert not missing_kernels(VARIANTS)
"""
USE = """
print(len(missing_kernels(VARIANTS)))
compile_rms_norm(torch.float32)
assert rms_norm(torch.ones(1, 1), torch.ones(1), 0.0) == 1
"""


def ran(program: str, cache: Path, **environment: str) -> tuple[str, str]:
    """What the program wrote to stdout and stderr."""
    given = {**os.environ, "PYTHONPATH": ":".join(sys.path), "NUMBA_CACHE_DIR": str(cache)}
    command, given = [sys.executable, "-c", program], given | environment
    done = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_built_kernels_are_loaded_and_another_processor_builds_its_own(tmp_path: Path) -> None:
    """Workers compile, so the process that started them is the first to load what they left."""
    built = ran(START + BUILD + USE, tmp_path)
    assert built == ("0", "")  # nothing was compiled: that is logged
    missing, log = ran(START + USE, tmp_path, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert missing == "2"
    assert "compiling a kernel" in log


def test_ctrl_c_ends_the_workers_and_is_not_theirs(tmp_path: Path) -> None:
    """They stand in for workers that compile for a minute, and do not look at their stdin."""
    fifo, worker = tmp_path / "fifo", tmp_path / "worker"
    os.mkfifo(fifo)
    worker.write_text(f"#!/bin/sh\nread variants\necho $$ > {fifo}\nexec sleep 60\n")
    worker.chmod(0o755)
    program = START + BUILD.replace("seen = []", f"seen = []\nsys.executable = {str(worker)!r}")
    given = {**os.environ, "PYTHONPATH": ":".join(sys.path), "NUMBA_CACHE_DIR": str(tmp_path)}
    build = subprocess.Popen(
        [sys.executable, "-c", f"import sys{program}"],
        env=given,
        stderr=subprocess.PIPE,
        text=True,
    )
    with os.fdopen(os.open(fifo, os.O_RDWR)) as started:
        workers = [int(started.readline()) for _ in VARIANTS]
    assert os.getpgid(build.pid) not in [os.getpgid(pid) for pid in workers]
    build.send_signal(signal.SIGINT)
    _, log = build.communicate(timeout=30)
    assert log.strip().endswith("KeyboardInterrupt")
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_a_worker_that_ends_early_is_an_error_and_ends_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    steps: list[int] = []
    with pytest.raises(KernelBuildError, match="has ended"):
        build_kernels(VARIANTS, num_processes=2, on_progress=lambda done, _: steps.append(done))
    assert steps == [0]


def test_a_worker_whose_parent_has_gone_ends_without_a_traceback(tmp_path: Path) -> None:
    program = (
        "from aserve_kernels.cpu import build\n"
        "build.COMPILERS = {'none': lambda *_: None}\n"
        "build.main()\n"
    )
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input="none:float32:1 none:float32:2\n",
        stdout=writes,
        stderr=subprocess.PIPE,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        text=True,
        timeout=60,
    )
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, "")
