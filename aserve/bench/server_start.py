"""Starts `aserve serve` in another process, and measures its start time and its memory.

The server is ready when it prints its address. Its memory is read from /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from aserve.bench.cpu_time import process_tree
from aserve.errors import ConfigError
from aserve.messages.base import KIB

READY = re.compile(r"^aserve: .* at (http://[^\s,]+)")
SERVER = ("aserve", "serve")
END_S = 30.0


class ServerStart(msgspec.Struct, frozen=True):
    ready_s: float  # from the start of the command
    memory_bytes: int  # resident memory of all its processes, once it is ready


@dataclass(frozen=True, slots=True)
class RunningServer:
    address: str
    pid: int
    ready_s: float


async def start_server(*options: str) -> ServerStart:
    async with serving(*options) as server:
        return ServerStart(server.ready_s, resident_bytes(server.pid))


@contextlib.asynccontextmanager
async def serving(*options: str, program: Sequence[str] = SERVER) -> AsyncIterator[RunningServer]:
    """Runs a server, or a router, while the context is open. Its further output is dropped.
    `program` is a module and its first arguments.
    """
    start_s = time.perf_counter()
    words = (sys.executable, "-m", *program, "--port", "0", *options)
    process = await create_subprocess_exec(*words, stdout=PIPE, stderr=STDOUT)
    try:
        address = await _ready(process)
        yield RunningServer(address, process.pid, time.perf_counter() - start_s)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            await process.communicate()


async def _ready(process: Process) -> str:
    """Waits until the server prints its address, and returns it."""
    assert process.stdout is not None
    lines = []
    async for line in process.stdout:
        lines.append(line.decode())
        if ready := READY.match(lines[-1]):
            return ready[1]
    raise ConfigError(f"the server did not start: {' '.join(lines)[-500:]}")


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process and all its descendants."""
    num_bytes = sum(map(_resident_bytes, process_tree(pid)))
    if not num_bytes:
        raise ConfigError("this system does not report the memory of a process (VmRSS)")
    return num_bytes


def _resident_bytes(process: Path) -> int:
    """NOTE: a process that is ending has no memory left, and no line about it."""
    try:
        status = (process / "status").read_text()
    except OSError:
        return 0  # it has ended
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * KIB if found else 0
