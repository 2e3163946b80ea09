"""`make gpu-check` as a user runs it: without a GPU, dry, and with packages out of wheels."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aserve.cli import make_parser
from tests.architecture.source import ROOT
from tests.bench.last_line import Captured, figures_of
from tests.collected import HAS_GPU_TESTS
from tools.gpu_check.command import BENCHES
from tools.gpu_check.parts import MEASURES, Part, all_parts
from tools.gpu_check.records import Records
from tools.gpu_check.shapes import SIZES, Sizes


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets for its children ends with the test."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


DRY = ("--device", "cpu", "--shape", "tiny")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_without_a_gpu_nothing_is_run_and_the_table_is_empty(
    capsys: Captured, tmp_path: Path
) -> None:
    figures = figures_of(capsys, "gpu-check", "--out", str(tmp_path), benches=BENCHES)
    assert set(figures["parts"].values()) == {"not run"}
    records = Records(tmp_path).read()
    assert set(records) == set(all_parts())
    assert {record.reason for record in records.values()} == {
        "no GPU: torch sees none on this machine"
    }
    assert (
        "| overlap: depth 2 over depth 1, Qwen3-0.6B shape, batch 256 | at least 1.150 |  |"
        in (tmp_path / "gpu-check.md").read_text()
    )


# Parts that run another bench differ in its name and arguments, and those benches have tests of
# their own: one of them shows the way.
OTHER_BENCHES = ["bench-host-step", "bench-kernels", "bench-overlap-sim", "bench-relay"]
IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"
RUN_DRY = sorted(MEASURES) if IS_LARGE else sorted({*MEASURES} - {*OTHER_BENCHES[1:]})


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_DRY)
def test_a_part_runs_dry_on_the_cpu(name: str, capsys: Captured, tmp_path: Path) -> None:
    figures_of(capsys, "gpu-check", *DRY, "--parts", name, "--out", str(tmp_path), benches=BENCHES)
    record = Records(tmp_path).read()[name]
    if name != "bench-kernels":  # which only a GPU has
        assert (record.status, record.reason) == ("done", "")
        assert record.figures
    if name.startswith("decode-"):
        assert record.figures["replayed_share_b3"] == 1
        assert "executor_over_replay_b3" in record.figures


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_arguments_of_other_benches_are_theirs(sizes: Sizes) -> None:
    assert {f"bench-{name}" for name in sizes.bench_arguments} <= {*OTHER_BENCHES}
    for name, arguments in sizes.bench_arguments.items():
        _, unknown = make_parser().parse_known_args(["bench", name, *arguments])
        assert unknown == []


@pytest.mark.slow
def test_every_file_with_tests_for_a_gpu_is_a_part(pytestconfig: pytest.Config) -> None:
    """As pytest finds them: in this run, where it is one of all tests, else in one of its own."""
    collected = pytestconfig.stash[HAS_GPU_TESTS]
    if collected.keys() >= {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}:
        files = {path for path, has_gpu_tests in collected.items() if has_gpu_tests}
    else:
        files = _collected_by_itself()
    assert "tests/gpu/cuda/test_engine.py" in files
    parts = {name: part for name, part in all_parts().items() if name.startswith("tests-")}
    assert files <= {part.argument for part in parts.values()}
    assert all(part.needs_gpu for part in parts.values())


def _collected_by_itself() -> set[str]:
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu")
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    return {line.partition("::")[0] for line in collected.stdout.splitlines() if "::" in line}


def test_no_part_may_take_eight_minutes() -> None:
    assert max(part.limit_s for part in all_parts().values()) < 480


def test_a_package_that_is_not_there_is_named() -> None:
    assert Part("", "", needs=("json", "no_such_package")).missing() == "no_such_package"
    assert Part("", "", needs=("json",)).missing() == ""


def write_wheel(folder: Path, name: str, content: str) -> None:
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@pytest.mark.slow
def test_a_package_out_of_a_wheel_is_found_before_the_engine_is_imported(tmp_path: Path) -> None:
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    write_wheel(wheels, "aserve_wheel_probe", "VALUE = 7\n")
    ended = run(*DRY, "--wheels", str(wheels), "--out", str(out), "--parts", "limits")
    assert ended.returncode == 0, ended.stderr
    assert Records(out).read()["limits"].status == "done"
    site = out / "site"
    assert (site / "aserve_wheel_probe.py").exists()
    installed = (site / "aserve_wheel_probe.py").stat().st_mtime_ns
    assert (
        run(*DRY, "--wheels", str(wheels), "--out", str(out), "--parts", "limits").returncode == 0
    )
    assert (site / "aserve_wheel_probe.py").stat().st_mtime_ns == installed


@pytest.mark.slow
def test_a_folder_without_wheels_is_one_line(tmp_path: Path) -> None:
    ended = run(*DRY, "--wheels", str(tmp_path), "--out", str(tmp_path / "out"))
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [f"gpu-check: --wheels {tmp_path}: there is no wheel in it"]


def test_the_way_to_the_wheels_needs_no_package() -> None:
    """`-S` leaves the standard library alone on the path; what else is missing is named."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "tools.gpu_check"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert re.fullmatch(r"gpu-check: \w+ is not installed, nor among the wheels", line)


@pytest.mark.slow
def test_the_engine_is_imported_without_what_a_gpu_machine_may_lack() -> None:
    """Of the rest a part says what it needs."""
    lacking = ("uvloop", "xgrammar", "flashinfer")
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking!r})); import aserve.engine"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
