"""The oracle sees errors: breaks one line at a time; every break must turn its test red.

    make mutants        or: python -m tests.mutants [NAME ...]

Works on copies of the tree in a temporary folder, one for each of its processes. Exit code 1 if a
mutant survives or its line is gone.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from tests.mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
NUM_PROCESSES = 2
GREEN, RED = 0, 1
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
TIMEOUT_S = 120  # for each test: a break may stop everything, which nothing else notices


class Verdict(NamedTuple):
    """`killed_by` is the first test that turned red; cpu_s what the run took on all its threads."""

    problem: str | None
    killed_by: str
    cpu_s: float


def main(names: list[str]) -> int:
    console = Console()
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(NUM_PROCESSES):
            trees.put(_copy_tree(Path(folder) / str(number)))
        tests = sorted({mutant.test for mutant in chosen})
        green = _run(Path(folder) / "0", tests, timeout_s=10 * TIMEOUT_S)
        if green.problem != "SURVIVED":
            console.print(f"red without any mutant: {green.killed_by or green.problem}")
            return 1
        with ThreadPoolExecutor(NUM_PROCESSES) as pool:
            runs = {pool.submit(_try_in, trees, mutant): mutant for mutant in chosen}
            done = track(as_completed(runs), "mutants", total=len(runs), console=console)
            verdicts = {runs[run]: run.result() for run in done}
    for mutant in chosen:
        console.print(_line(mutant, verdicts[mutant]), soft_wrap=True, markup=False)
    survivors = [verdict for verdict in verdicts.values() if verdict.problem is not None]
    total_s = sum(verdict.cpu_s for verdict in (green, *verdicts.values()))
    console.print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    console.print(f"{total_s:.0f} s of CPU, {green.cpu_s:.0f} s of it without any mutant")
    return 1 if survivors else 0


def _copy_tree(folder: Path) -> Path:
    for name in ("aserve", "kernels", "tests", "tools"):
        ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _try_in(trees: queue.SimpleQueue[Path], mutant: Mutant) -> Verdict:
    tree = trees.get()
    try:
        return _try(tree, mutant)
    finally:
        trees.put(tree)


def _try(tree: Path, mutant: Mutant) -> Verdict:
    path = tree / mutant.file
    source = path.read_text()
    if source.count(mutant.line) != 1:
        return Verdict("NO LINE", "", 0.0)
    path.write_text(source.replace(mutant.line, mutant.broken))
    try:
        return _run(tree, [mutant.test])
    finally:
        path.write_text(source)


def _run(tree: Path, tests: list[str], *, timeout_s: int = TIMEOUT_S) -> Verdict:
    """A mutant that cannot even be imported is not one that was noticed."""
    environment = {**os.environ, "ASERVE_TEST_PROFILE": "mutants"}
    environment |= {"PYTHONPATH": f"{tree}:{tree / 'kernels'}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("ASERVE_TEST_SEED", None)
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, *PYTEST, f"--timeout={timeout_s}", *tests]
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+)(?: |$)", said.read(), re.MULTILINE)
    problem = {GREEN: "SURVIVED", RED: None}.get(process.returncode, "NO TEST")
    return Verdict(problem, failed[1] if failed else "", usage.ru_utime + usage.ru_stime)


def _line(mutant: Mutant, verdict: Verdict) -> str:
    killed_by = f" <- {verdict.killed_by}" if verdict.killed_by else ""
    what = f"{mutant.file.removeprefix('aserve/')}: {mutant.name}"
    return f"{verdict.problem or 'killed':8} {verdict.cpu_s:5.1f} s  {what}{killed_by}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
