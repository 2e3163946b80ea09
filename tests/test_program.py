"""A process has its three standard streams, whichever of them were closed when it started."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aserve.host.environment import ending_signals

# A process of its own says by its exit code that all is well: its output may be closed.
PROGRAM = """
import os, subprocess, sys
from aserve.program import open_standard_streams
open_standard_streams()
assert os.open(os.devnull, os.O_RDONLY) > 2, "a new file gets no number of a standard stream"
print("to nobody, or to the test")
print("to nobody, or to the test", file=sys.stderr)
sys.stdin.read()
child = "import os; [os.fstat(number) for number in range(3)]"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode or 40)
"""
CLOSED = [
    " ".join(chosen)
    for count in range(4)
    for chosen in itertools.combinations(("<&-", ">&-", "2>&-"), count)
]


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_streams_are_opened_for_the_process_and_its_children(closed: str) -> None:
    command = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 40, done.stderr
    assert done.stdout == ("" if " >&-" in f" {closed}" else "to nobody, or to the test\n")


@pytest.fixture
def _hang_up() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hang_up")
def test_a_hang_up_ends_the_server_unless_nohup_has_it_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert set(ending_signals()) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert set(ending_signals()) == {signal.SIGINT, signal.SIGTERM}
