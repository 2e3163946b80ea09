"""Who belongs to a process: what each of its threads started, and what those started."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from aserve.bench.cpu_time import process_tree

WAIT = "print('here', flush=True)\ninput()\n"
START_ANOTHER = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WAIT!r}])\n"


def start(code: str, started: list[subprocess.Popen[bytes]]) -> None:
    pipe = subprocess.PIPE
    started.append(subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe))


def test_children_of_every_thread_and_theirs_belong_to_it() -> None:
    before = list(process_tree(os.getpid()))
    started: list[subprocess.Popen[bytes]] = []
    has_started, may_end = threading.Event(), threading.Event()

    def beside() -> None:
        start(START_ANOTHER, started)
        has_started.set()
        may_end.wait(30)  # a child of a thread that has ended goes to another

    start(WAIT, started)
    thread = threading.Thread(target=beside)
    thread.start()
    assert has_started.wait(30)
    for child in started:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
    found = [process.name for process in process_tree(os.getpid()) if process not in before]
    for child in started:
        child.communicate(b"\n")
    may_end.set()
    thread.join()
    assert {str(child.pid) for child in started} < set(found)
    assert len(found) == 3
