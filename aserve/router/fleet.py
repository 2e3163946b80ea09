"""The servers of `--replicas N`: child processes of the router, each on a Unix socket.

A process sends one byte when it is ready, and closes its socket when it ends. One that dies is
started again on the same address. A process drains and ends when the router sends it a byte: after
the replica was removed, or when the router itself has drained. The end of the router's side ends
one that drains at once, and lets others drain, whose router has died.

`Fleet` alone writes which processes there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO

from aserve import frames
from aserve.config import Resolved, system_variables
from aserve.errors import ConfigError
from aserve.host.limits import may_have_cuda, num_cuda_devices, usable_cpus
from aserve.http.peers import Peers
from aserve.processes.engine_process import END_S, Restarts, ended, spawned
from aserve.processes.link import END_OF_IMPORT, StartReplica
from aserve.router.upstream import UNIX

REPLICA = (sys.executable, "-m", "aserve.processes.replica")
DEVICES = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
MOST = 256  # replicas of one machine
LEAVE = b"\1"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Member:
    """One replica, and the process that it has now. `place` is the number of its share of the
    machine, which no other member has at the same time.
    """

    place: int
    address: str
    process: subprocess.Popen[bytes]
    link: socket.socket
    is_leaving: bool = False
    is_ready: bool = False  # the process that it has now
    has_served: bool = False

    def leave(self) -> None:
        """Asks the process to drain and end, or ends it while it imports the server."""
        if not self.is_leaving:
            self.is_leaving = True
            with contextlib.suppress(OSError):  # it has ended already
                self.link.send(LEAVE)
            if not self.is_ready:
                self.process.send_signal(END_OF_IMPORT)

    def end(self) -> None:
        """Asks the process, which drains, to end at once."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_WR)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The calls by which a fleet tells its router about the members, by their addresses."""

    joined: Callable[[str], None]
    ready: Callable[[str], None]
    died: Callable[[str], None]
    left: Callable[[str], None]


class Fleet:
    """`run` keeps the processes until `close`; `scale` changes their number. `serving` is set once
    all of the first ones have loaded, and `failed` once there is none left; `exit_code` then says
    why. `ended` is set when all have ended after `leave` or `close`.
    """

    def __init__(
        self, resolved: Resolved, registry: Registry, *, command: Sequence[str] = REPLICA
    ) -> None:
        self.peers = Peers(token=secrets.token_hex(16))
        self.serving = asyncio.Event()
        self.failed = asyncio.Event()
        self.ended = asyncio.Event()
        self.exit_code = 0
        self._resolved = resolved
        self._registry = registry
        self._command = command
        self._directory = ""  # of the sockets
        self._shares = shares_of(resolved, system_variables(DEVICES, THREADS))
        self._numbers = itertools.count()
        self._members: dict[str, Member] = {}
        self._group: asyncio.TaskGroup | None = None  # of `run`
        self._is_ending = False
        self._closing = asyncio.Event()

    async def run(self) -> None:
        """Starts the replicas of the options, and returns when all have ended."""
        folder = tempfile.TemporaryDirectory(prefix="aserve-", ignore_cleanup_errors=True)
        with folder as self._directory, self._closed_links():
            async with asyncio.TaskGroup() as self._group:
                if not self._is_ending:
                    self.scale(self._resolved.server.replicas)
                await self._closing.wait()
        self.ended.set()

    @contextlib.contextmanager
    def _closed_links(self) -> Iterator[None]:
        """Closes the sockets of processes that are left by an error, which ends them."""
        try:
            yield
        finally:
            for member in self._members.values():
                member.link.close()

    def scale(self, count: int) -> list[str]:
        """Starts members up to the count. Returns the addresses of those above it, the newest
        ones, which the router removes; they end when it says that they have left.
        """
        if self._group is None:
            raise ConfigError("the replicas are not started yet")
        if count > len(self._shares):
            raise ConfigError(f"there are devices for {len(self._shares)} replicas, not {count}")
        present = [each for each in self._members.values() if not each.is_leaving]
        for _ in range(count - len(present)):
            self._group.create_task(self._keep(self._joined()))
        return [each.address for each in present[count:]]

    def release(self, address: str) -> None:
        """The router has removed the member, and none of its requests is open any more."""
        member = self._members.get(address)
        if member is not None:
            member.leave()

    def stop_restarting(self) -> None:
        self._is_ending = True

    def leave(self) -> None:
        """Lets all processes drain and end."""
        self.stop_restarting()
        for member in self._members.values():
            member.leave()
        self._closing.set()

    async def close(self) -> None:
        """Ends all processes at once, and kills those that have not ended in time."""
        self.leave()
        for member in self._members.values():
            member.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self.ended.wait()
        for member in self._members.values():
            member.process.kill()
        await self.ended.wait()

    def _joined(self) -> Member:
        taken = {each.place for each in self._members.values()}
        place = next(each for each in itertools.count() if each not in taken)
        if place >= len(self._shares):
            raise ConfigError("the devices of a replica that leaves are not free yet; try again")
        address = f"{UNIX}{self._directory}/{next(self._numbers)}.sock"
        member = Member(place, address, *self._spawned(place, address))
        self._members[address] = member
        self._registry.joined(address)
        return member

    def _spawned(self, place: int, address: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = spawned(self._command, theirs)
        resolved = options_of(self._resolved, place, address.removeprefix(UNIX))
        start = StartReplica(resolved, os.getcwd(), self._shares[place], self.peers.token)
        message = BytesIO()
        frames.send(message, start)
        with contextlib.suppress(OSError):  # it has ended already, which its socket tells `_keep`
            ours.sendall(message.getvalue())
        ours.setblocking(False)
        return process, ours

    async def _keep(self, member: Member) -> None:
        """The life of one replica, from its first process to its last."""
        restarts = Restarts(self._resolved.server.max_engine_restarts)
        delay_s: float | None = 0.0
        while delay_s is not None:
            code, up_s = await self._watched(member)
            if self._leaves(member):
                break
            self._registry.died(member.address)
            if not member.has_served:
                self.exit_code = 1 if code is None else max(code, 1)
                break
            delay_s = restarts.delay_s(up_s=up_s)
            if delay_s is None:
                logger.critical("replica died too often address=%s", member.address)
                break
            text = "replica died, restarting address=%s exit_code=%s delay_s=%s"
            logger.error(text, member.address, code, delay_s)
            await asyncio.sleep(delay_s)
            if self._leaves(member):  # it was removed while there was no process
                break
            member.process, member.link = self._spawned(member.place, member.address)
            member.is_ready = False
        del self._members[member.address]
        self._registry.left(member.address)
        if not self._is_ending and (self.exit_code != 0 or not self._members):
            self.exit_code = max(self.exit_code, 1)
            self.failed.set()

    def _leaves(self, member: Member) -> bool:
        return member.is_leaving or self._is_ending

    async def _watched(self, member: Member) -> tuple[int | None, float]:
        """Waits for the end of a process. Returns its exit code, and how long it was ready."""
        loop = asyncio.get_running_loop()
        ready_s = None
        with contextlib.suppress(OSError):
            while await loop.sock_recv(member.link, 1):
                ready_s = time.monotonic()
                member.is_ready = member.has_served = True
                self._registry.ready(member.address)
                if all(each.has_served for each in self._members.values()):
                    self.serving.set()
        member.link.close()
        code = await ended(member.process, timeout_s=END_S)
        return code, 0.0 if ready_s is None else time.monotonic() - ready_s


def options_of(resolved: Resolved, place: int, uds: str) -> Resolved:
    """Returns the options of one replica: it serves plain HTTP on its socket, draws other seeds
    than the others, and has its own folders and files.
    """
    server, debug = resolved.server, resolved.debug
    own = f"replica-{place}"
    server = dataclasses.replace(
        server,
        replicas=1,
        uds=uds,
        ssl_certfile=None,
        ssl_keyfile=None,
        ssl_ca_certs=None,
        files_dir=None if server.files_dir is None else os.path.join(server.files_dir, own),
    )
    debug = dataclasses.replace(
        debug,
        seed=None if debug.seed is None else debug.seed + place,
        record=None if debug.record is None else f"{debug.record}.{own}",
    )
    return dataclasses.replace(resolved, server=server, debug=debug)


def shares_of(resolved: Resolved, environment: Mapping[str, str]) -> Sequence[dict[str, str]]:
    """Returns the variables of each share of the machine: GPUs, one for each rank, or cores. There
    are as many shares as GPUs have room for, and on a CPU more than anybody wants.
    """
    count = resolved.server.replicas
    device, num_ranks = resolved.machine.device, resolved.machine.tensor_parallel_size
    if not may_have_cuda(device):
        threads = environment.get(THREADS) or str(max(1, usable_cpus() // count))
        return [{THREADS: threads}] * MOST
    named = environment.get(DEVICES)
    all_devices = range(num_cuda_devices()) if named is None else named.split(",")
    devices = [str(each) for each in all_devices]
    shares = [
        {DEVICES: ",".join(devices[start : start + num_ranks])}
        for start in range(0, len(devices) - num_ranks + 1, num_ranks)
    ]
    if len(shares) < count:
        raise ConfigError(
            f"--replicas {count} with {num_ranks} GPUs each needs {count * num_ranks} GPUs, and "
            f"there are {len(devices)}"
        )
    return shares
