"""The single file unpacks its program once, whoever starts it and from where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, modules

PROGRAM = """#!/bin/sh
printf '%s|' "$@"
exit 7
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with a space")
    (folder / "program").mkdir()
    program = folder / "program" / "aserve"
    program.write_text(PROGRAM)
    program.chmod(0o777)
    packed = folder / "aserve-x86_64"
    subprocess.run([ROOT / "docker/pack.sh", program.parent, packed], check=True)
    return packed


def started(file: Path, cache: Path) -> subprocess.Popen[str]:
    environment = {"PATH": f"{file.parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(cache)}
    command = [file.name, "two words", "-m", ""]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd="/", env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0
    )


def test_the_program_is_unpacked_by_the_first_start(file: Path, tmp_path: Path) -> None:
    for words in ("unpacking the program", ""):
        process = started(file, tmp_path)
        shown, said = process.communicate()
        assert (process.returncode, shown) == (7, "two words|-m||")
        assert words in said
        assert bool(words) == bool(said)
    (unpacked,) = (tmp_path / "aserve").iterdir()
    assert (unpacked / "aserve").stat().st_mode & 0o777 == 0o755
    assert unpacked.parent.stat().st_mode & 0o777 == 0o700


def test_starts_at_the_same_time_share_one_program(file: Path, tmp_path: Path) -> None:
    processes = [started(file, tmp_path) for _ in range(8)]
    assert [process.communicate()[0] for process in processes] == ["two words|-m||"] * 8
    assert len(list((tmp_path / "aserve").iterdir())) == 1
    assert list(tmp_path.rglob("unpacking*")) == []


def test_a_cache_that_cannot_be_written_is_an_error(file: Path) -> None:
    process = started(file, Path("/dev/null"))
    assert process.communicate()[1]
    assert process.returncode not in (0, 7)


def entered(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docker/entry.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_binary_is_the_command_and_runs_its_own_modules_like_the_interpreter() -> None:
    assert entered("version").stdout.startswith("aserve ")
    assert entered("-m", "aserve", "version").stdout == entered("version").stdout
    assert "argument COMMAND: invalid choice" in entered("-m", "timeit").stderr


def test_every_process_that_the_product_starts_can_be_started_by_the_binary() -> None:
    """In the binary `sys.executable` is the binary, which takes only `-m` and a module of ours."""
    lost = [
        f"{module.path}: {line.strip()}"
        for module in modules("aserve", "kernels")
        for line in module.source.splitlines()
        if "sys.executable" in line and 'sys.executable, "-m", ' not in line
    ]
    assert lost == []
