"""One file of tests that are marked `gpu`, run by pytest; how many passed, and what failed.

It does not know what they test.
"""

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
        command = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
        arguments = (*_processes(path), f"--junitxml={report}", path)
        ended = subprocess.run((*command, *arguments), cwd=ROOT, check=False)
        if not report.exists():
            raise BugError(f"pytest ended with {ended.returncode} and without a report")
        return read_report(report)


def _processes(path: str) -> tuple[str, ...]:
    """Kernels are compiled for each of their cases, and need next to no memory of the device: so
    several processes test them, where pytest can do that.
    """
    if not path.startswith(KERNELS) or importlib.util.find_spec("xdist") is None:
        return ()
    return ("-n", str(max(1, (os.cpu_count() or 1) // 2)))


def read_report(report: Path) -> Figures:
    """A test that had an error before or after it counts as failed; a skipped one, too: on a GPU
    there is no reason for it.
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
