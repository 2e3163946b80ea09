"""`aserve serve` in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from openai import AsyncOpenAI

REPOSITORY = Path(__file__).parents[2]
START_S = 60.0  # far more than it takes, for a machine that does something else, too
PIPE_BYTES = 1 << 20  # a server waits where nobody reads so much of its output


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "aserve", *arguments]


def environment() -> dict[str, str]:
    """No options from outside, and no more threads than the tests have."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ASERVE_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
    )


class ServerProcess:
    """Started on entering, ready (or ended) when that returns; killed on leaving if need be.

    It compiles grammars only where the options have `--grammar-workers`: the imports of a worker
    take three seconds of processor time.
    """

    def __init__(self, *options: str, arguments: list[str] | None = None) -> None:
        defaults = ("--port", "0", "--grammar-workers", "0", "--seed", "0")
        self._arguments = arguments or command("serve", *defaults, *options)
        self.address = ""

    def __enter__(self) -> ServerProcess:
        self.process = subprocess.Popen(
            self._arguments,
            cwd=REPOSITORY,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pipesize=PIPE_BYTES,
        )
        self.lines: list[str] = []
        for line in self._output:
            self.lines.append(line)
            bound = re.search(r"http://[\d.]+:\d+", line)
            if bound is not None and line.startswith("aserve: "):
                self.address = bound[0]
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._output.close()

    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=f"{self.address}/v1", api_key="any", max_retries=0, timeout=START_S
        )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """An open answer; read it line by line while it streams."""
        request = urllib.request.Request(
            self.address + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=START_S)

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.address + path, timeout=START_S) as answer:
            data: bytes = answer.read()
        return data

    def read_until(self, words: str) -> None:
        """Its output up to the line with these words."""
        for line in self._output:
            self.lines.append(line)
            if words in line:
                return
        raise AssertionError(f"the server ended without {words!r}: {self.text}")

    def end(self, number: signal.Signals | None = signal.SIGTERM) -> tuple[int, float]:
        """Exit code, and how long the end took."""
        start_s = time.monotonic()
        if number is not None:
            self.process.send_signal(number)
        self.lines += self._output.readlines()
        return self.process.wait(START_S), time.monotonic() - start_s

    @property
    def engine_pid(self) -> int:
        """The server's own, where it is one process."""
        engines = children_of(self.process.pid, module="aserve.processes.engine")
        return engines[0] if engines else self.process.pid

    @property
    def rank_pids(self) -> list[int]:
        """The processes of the ranks, that of rank 0 first."""
        engine = self.engine_pid
        return [engine, *children_of(engine, module="aserve.parallel.rank")]

    def metric(self, name: str) -> float:
        """The sum over all labels of the metrics whose line begins so."""
        lines = self.get("/metrics").decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def memory_bytes(self) -> int:
        """Of all its processes, but for those of grammars."""
        return sum(map(resident_bytes, {self.process.pid, self.engine_pid}))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def _output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout


def children_of(pid: int, *, module: str) -> list[int]:
    """The children of a process that run `python -m module`, in the order of their start."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            children = (task / "children").read_text().split()
            found += [child for child in map(int, children) if _runs(child, module)]
    return sorted(found)


def _runs(pid: int, module: str) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
