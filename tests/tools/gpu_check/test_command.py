"""`make gpu-check` as a user runs it: without a GPU, dry, and with packages out of wheels."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aserve.cli import make_parser
from tests.architecture.source import ROOT
from tests.bench.last_line import Captured, figures_of
from tests.collected import HAS_GPU_TESTS, all_files
from tools.gpu_check.command import BENCHES
from tools.gpu_check.parts import MEASURES, all_parts
from tools.gpu_check.records import Figures, Records
from tools.gpu_check.setting import Setting
from tools.gpu_check.shapes import SIZES, Sizes

OTHER_BENCHES = {"bench-host-step", "bench-kernels", "bench-overlap-sim", "bench-relay"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_without_a_gpu_nothing_is_run_and_the_table_is_empty(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the command sets for its children ends with the test.
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    figures_of(capsys, "gpu-check", "--out", str(tmp_path), benches=BENCHES)
    records = Records(tmp_path).read()
    assert set(records) == set(all_parts())
    said = {(record.status, record.reason) for record in records.values()}
    assert said == {("not run", "torch finds no GPU on this machine")}
    line = "| overlap: depth 2 over depth 1, Qwen3-0.6B shape, batch 256 | at least 1.150 |  |"
    assert line in (tmp_path / "gpu-check.md").read_text()


# Benches of `aserve bench` have tests of their own: one of them shows the way. Decode steps of
# the large model are measured as those of the small one, and all drafters in one way. Two ranks
# are processes, which have tests of their own.
IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"
DRAFTERS = {name for name in MEASURES if name.startswith("speculation-")}
ALIKE = {*OTHER_BENCHES, "decode-large", "quantized-int8", "ranks-two", *DRAFTERS} - {
    "bench-host-step",
    "speculation-EAGLE3",
}
ONLY_ON_A_GPU = ("bench-kernels", "quantized-fp8")
LEFT_OUT = set() if IS_LARGE else ALIKE


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*MEASURES} - LEFT_OUT))
def test_a_part_runs_dry_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Within this process: that each has one of its own is shown in test_check.py."""
    kept: list[Figures] = []
    part = MEASURES[name]
    setting = Setting("cpu", "tiny", tmp_path, kept.append)
    figures = importlib.import_module(part.module).measure(setting, part.argument)
    assert figures
    assert ("not_run" in figures) == (name in ONLY_ON_A_GPU)
    if name.startswith("speculation-"):
        assert figures["equal_outputs"] == 1
        assert figures.get("acceptance_error", 0) == 0
    if name.startswith("ranks-"):
        assert figures["equal_outputs"] == 1
    if name.startswith("decode-"):
        assert figures["replayed_share_b3"] == 1
        assert "executor_over_replay_b3" in figures


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_arguments_of_other_benches_are_theirs(sizes: Sizes) -> None:
    assert {f"bench-{name}" for name in sizes.bench_arguments} <= OTHER_BENCHES
    for name, arguments in sizes.bench_arguments.items():
        _, unknown = make_parser().parse_known_args(["bench", name, *arguments])
        assert unknown == []


@pytest.mark.slow
def test_every_file_with_tests_for_a_gpu_is_a_part(pytestconfig: pytest.Config) -> None:
    """As pytest finds them: in this run, where it is one of all tests, else in one of its own."""
    collected = pytestconfig.stash[HAS_GPU_TESTS]
    if collected.keys() >= all_files():
        files = {path for path, has_gpu_tests in collected.items() if has_gpu_tests}
    else:
        lines = run("-m", "pytest", "--collect-only", "-q", "-m", "gpu").stdout.splitlines()
        files = {line.partition("::")[0] for line in lines if "::" in line}
    assert "tests/gpu/cuda/test_engine.py" in files
    parts = {name: part for name, part in all_parts().items() if name.startswith("tests-")}
    assert files <= {part.argument for part in parts.values()}
    assert all(part.needs_gpu for part in parts.values())
    assert max(part.limit_s for part in all_parts().values()) < 480


def test_the_way_to_the_wheels_needs_no_package() -> None:
    """`-S` leaves the standard library alone on the path; what else is missing is named."""
    ended = run("-S", "-m", "tools.gpu_check", PYTHONPATH="")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert re.fullmatch(r"gpu-check: \w+ is not installed, nor among the wheels", line)


@pytest.mark.slow
def test_the_engine_is_imported_without_what_a_gpu_machine_may_lack() -> None:
    """Of the rest a part says what it needs."""
    lacking = ("uvloop", "xgrammar", "flashinfer")
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking!r})); import aserve.engine"
    ended = run("-c", code)
    assert ended.returncode == 0, ended.stderr
