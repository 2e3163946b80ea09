"""CPU time of a process tree, out of /proc."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from aserve.bench.cpu_time import tree_cpu_s
from aserve.errors import ConfigError

BURN = "import time\nwhile time.process_time() < 0.2: pass\n"
BURN_AND_STAY = BURN + "print('burnt', flush=True)\ninput()\n"


def own_cpu_s() -> float:
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def test_the_cpu_time_of_a_child_counts_while_it_runs_and_after_it_was_waited_for() -> None:
    before_s, own_before_s = tree_cpu_s(os.getpid()), own_cpu_s()
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", BURN_AND_STAY], stdin=pipe, stdout=pipe)
    assert child.stdout is not None
    assert child.stdout.readline() == b"burnt\n"
    assert tree_cpu_s(os.getpid()) - before_s > 0.15
    child.communicate(b"\n")
    took_s = tree_cpu_s(os.getpid()) - before_s
    assert took_s == pytest.approx(own_cpu_s() - own_before_s, abs=0.1)


def test_the_error_of_a_missing_process_names_it() -> None:
    with pytest.raises(ConfigError, match="--server-pid 4194305"):
        tree_cpu_s(4194305)
