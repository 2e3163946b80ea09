"""Runs a bench of `aserve bench` in a process of its own. Its last line of output has the
figures.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from aserve.errors import BugError
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting


def measure(setting: Setting, name: str) -> Figures:
    return run_bench(name, *setting.sizes.bench_arguments.get(name, ()))


def run_bench(name: str, *arguments: str) -> Figures:
    command = (sys.executable, "-m", "aserve", "bench", name, *arguments)
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    sys.stdout.write(ended.stdout.decode(errors="replace"))
    if ended.returncode:
        raise BugError(f"aserve bench {name} ended with {ended.returncode}")
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=Figures)
