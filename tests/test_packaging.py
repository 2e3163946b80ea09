"""`python -m build`: the wheel holds what serves, the source distribution holds the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

# The folders that a wheel installs, by where they are in the checkout.
SHIPPED = {"aserve/": "aserve/", "kernels/aserve_kernels/": "aserve_kernels/"}

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Built:
    wheel: Path
    source: Path

    def wheel_files(self) -> dict[str, str]:
        """The digest of each file by its path, without the wheel's own metadata."""
        with zipfile.ZipFile(self.wheel) as wheel:
            names = [name for name in wheel.namelist() if ".dist-info/" not in name]
            return {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in names}

    def source_files(self) -> set[str]:
        with tarfile.open(self.source) as archive:
            files = [member.name for member in archive.getmembers() if member.isfile()]
        return {name.partition("/")[2] for name in files}


def build(tree: Path) -> Built:
    """Runs `python -m build` with the setuptools of this environment: nothing is downloaded."""
    command = (sys.executable, "-m", "build", "--no-isolation", str(tree))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    (wheel,) = (tree / "dist").glob("*.whl")
    (source,) = (tree / "dist").glob("*.tar.gz")
    return Built(wheel, source)


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of the project, by git or, in an unpacked source distribution, by its own list."""
    if not (ROOT / ".git").exists():
        return (ROOT / "aserve.egg-info" / "SOURCES.txt").read_text().splitlines()
    command = ("git", "ls-files", "-z")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def tree(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that a build leaves nothing behind in it."""
    root = tmp_path_factory.mktemp("tree")
    for name in tracked:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture(scope="module")
def built(tree: Path) -> Built:
    return build(tree)


def test_the_wheel_holds_exactly_the_packages_that_serve(built: Built, tracked: list[str]) -> None:
    expected = {
        name.replace(folder, installed, 1)
        for folder, installed in SHIPPED.items()
        for name in tracked
        if name.startswith(folder)
    }
    assert set(built.wheel_files()) == expected


def test_the_source_distribution_holds_every_tracked_file(built: Built, tracked: list[str]) -> None:
    assert set(tracked) - built.source_files() == set()


def test_the_wheel_alone_can_be_imported(built: Built, tmp_path: Path) -> None:
    """No module that an engine or a server imports is missing from it, nor the bundled model."""
    site = tmp_path / "site"
    with zipfile.ZipFile(built.wheel) as wheel:
        wheel.extractall(site)
    code = (
        "import aserve.engine, aserve.server, aserve.bench.catalog\n"
        "from aserve.text.load import load_tokenizer\n"
        "from aserve.tiny import MODEL_DIR\n"
        "print(load_tokenizer(MODEL_DIR).encode('27+15=', with_special=False))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("[")
