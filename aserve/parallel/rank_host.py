"""The host of ranks on a machine without rank 0: it starts their processes when rank 0 says so, and
tells how they end.

A machine of --nnodes has one host, which is what `aserve serve` with a --node-rank above 0 is. It
joins again when the engine has died. On Ray, each rank has a host of its own, which is an actor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec

from aserve.config import Resolved
from aserve.errors import EngineDead
from aserve.frames import framed
from aserve.host.environment import ending_signals, installed_version
from aserve.host.hub import resolve_model_dir
from aserve.host.threads import Worker
from aserve.parallel.joining import (
    ALIVE_EVERY_S,
    Control,
    EndRanks,
    HostAlive,
    JoinAsHost,
    JoinAsRank,
    KillRanks,
    Leader,
    RankEnded,
    RanksLoaded,
    StartRanks,
    ToHost,
    prove,
    watched,
)
from aserve.parallel.processes import RANK, memory_folder, shared_folder
from aserve.processes.engine_process import END_S, describe, spawned

CONNECT_S = 5.0
RETRY_S = 0.5  # between two attempts to reach rank 0
FIRST_S = 600.0  # for rank 0 to listen at first; its machine may start later
AGAIN_S = 120.0  # for rank 0 to listen again after its engine has died
LOST = EndRanks(is_over=False)  # rank 0 has gone without a word

logger = logging.getLogger(__name__)


class HostSignalled(BaseException):
    """A signal asks this process to end. It is no Exception, so that nobody handles it."""


def serve_node(resolved: Resolved) -> int:
    """Hosts the ranks of this machine until the engine or a signal ends it, and returns the exit
    code. Raises ConfigError, or EngineDead if node 0 does not come (back)."""
    for number in ending_signals():
        signal.signal(number, _raise_signalled)
    leader = Leader(*resolved.nodes.address, resolved.nodes.dist_key or "")
    wait_s = FIRST_S
    with contextlib.suppress(HostSignalled):
        join = join_of(resolved, resolved.nodes.node_rank)
        while True:
            logger.info("waiting for node 0 address=%s:%d", leader.host, leader.port)
            ended = host_ranks(leader, join, wait_s=wait_s)
            logger.info("the engine has ended is_over=%s", ended.is_over)
            if ended.reason:
                raise EngineDead(f"node 0 has ended the engine: {ended.reason}")
            if ended.is_over:
                break
            wait_s = AGAIN_S
    return 0


def _raise_signalled(_number: int, _frame: object) -> None:
    raise HostSignalled


def join_of(resolved: Resolved, number: int) -> JoinAsHost:
    """Finds the model on this machine, which downloads it from the hub if need be."""
    is_dummy = resolved.model.load_format == "dummy"
    return JoinAsHost(
        version=installed_version("aserve") or "from its source",
        number=number,
        directory=os.getcwd(),
        model_dir=str(resolve_model_dir(resolved.model_source, has_weights=not is_dummy)),
        shared_folder=memory_folder(),
    )


def connected(leader: Leader, *, wait_s: float) -> socket.socket:
    """Connects to rank 0 as soon as it listens. Raises EngineDead if it does not in time, and
    WrongKey."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            return _proven(leader)
        except OSError as error:
            if time.monotonic() > until_s:
                where = f"{leader.host}:{leader.port}"
                reason = f"node 0 has not answered at {where} for {wait_s:.0f} s: {error}"
                raise EngineDead(reason) from None
        # NOTE: nothing tells that a port of another machine is open.
        threading.Event().wait(RETRY_S)


def _proven(leader: Leader) -> socket.socket:
    with contextlib.ExitStack() as undo:
        sock = socket.create_connection((leader.host, leader.port), timeout=CONNECT_S)
        undo.enter_context(sock)
        prove(sock, leader.key, is_leader=False)
        undo.pop_all()
    return watched(sock)


def host_ranks(leader: Leader, join: JoinAsHost, *, wait_s: float) -> EndRanks:
    """Runs ranks for one engine, until that ends. Raises what `connected` does."""
    control = Control[ToHost](connected(leader, wait_s=wait_s), ToHost)
    with contextlib.closing(control):
        control.send(join)
        start = control.receive(None)
        if isinstance(start, StartRanks):
            with (
                shared_folder(start.folder),
                _saying_alive(control),
                _ranks(leader, start, control) as processes,
            ):
                return _until_end(control, start, processes)
    return start if isinstance(start, EndRanks) else LOST


def _until_end(
    control: Control[ToHost], start: StartRanks, processes: Sequence[subprocess.Popen[bytes]]
) -> EndRanks:
    while True:
        message = control.receive(None)
        match message:
            case RanksLoaded():
                shutil.rmtree(start.folder, ignore_errors=True)
            case KillRanks():
                for process in processes:
                    process.kill()
            case EndRanks():
                return message
            case _:
                return LOST


@contextlib.contextmanager
def _ranks(
    leader: Leader, start: StartRanks, control: Control[ToHost]
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Starts the processes of ranks. Ends them behind the block, and tells how they ended."""
    processes: list[subprocess.Popen[bytes]] = []
    watches: list[Worker] = []
    try:
        for rank in start.ranks:
            with connected(leader, wait_s=CONNECT_S) as sock:
                join = JoinAsRank(start.launch, rank)
                sock.settimeout(None)  # as a rank expects of its stdin
                sock.sendall(framed(msgspec.msgpack.encode(join)))
                processes.append(spawned(RANK, sock))
            watches.append(_watch(rank, processes[-1], control))
        yield processes
    finally:
        for process in processes:
            _end(process)
        for watch in watches:
            watch.join()


@contextlib.contextmanager
def _saying_alive(control: Control[ToHost]) -> Iterator[None]:
    """Tells rank 0 within the block that this machine still runs."""
    is_over = threading.Event()

    def say() -> None:
        while control.send(HostAlive()) and not is_over.wait(ALIVE_EVERY_S):
            pass

    worker = Worker("alive", say, on_end=lambda _: None)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join()


def _watch(rank: int, process: subprocess.Popen[bytes], control: Control[ToHost]) -> Worker:
    def wait() -> None:
        code = process.wait()
        logger.info("rank=%d %s", rank, describe(code))
        control.send(RankEnded(rank, code))

    watch = Worker(f"rank-{rank}", wait, on_end=lambda _: None)
    watch.start()
    return watch


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for a rank, whose connection to rank 0 closes, and kills it after END_S."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
