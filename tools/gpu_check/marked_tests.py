"""Runs one file of tests marked `gpu` with pytest, and counts how many passed and failed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from aserve.errors import BugError
from tools.gpu_check.parts import ROOT
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting

MOST_NAMES = 20
KERNELS = "tests/kernels/"


def measure(_setting: Setting, path: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # WHY -v: the last line of the log is the test that a part which is killed was in.
        command = (sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider")
        arguments = (*_processes(path), f"--junitxml={report}", path)
        ended = subprocess.run((*command, *arguments), cwd=ROOT, check=False)
        if not report.exists():
            raise BugError(f"pytest ended with {ended.returncode} and without a report")
        return read_report(report)


def _processes(path: str) -> tuple[str, ...]:
    """Returns pytest's arguments for several processes, which tests of kernels use: each case is
    compiled, and needs little memory of the device.
    """
    if not path.startswith(KERNELS) or importlib.util.find_spec("xdist") is None:
        return ()
    return ("-n", str(max(1, (os.cpu_count() or 1) // 2)))


def read_report(report: Path) -> Figures:
    """Counts the tests. One with an error in its fixtures counts as failed, and so does a skipped
    one, because on a GPU there is no reason to skip.
    """
    cases = ElementTree.parse(report).getroot().iter("testcase")
    lost = {case: any(part.tag in LOST for part in case) for case in cases}
    names = [str(case.get("name")) for case, is_lost in lost.items() if is_lost]
    return {
        "passed": len(lost) - len(names),
        "failed": len(names),
        "names": names[:MOST_NAMES],
    }


LOST = frozenset({"failure", "error", "skipped"})
