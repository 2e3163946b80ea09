"""The rank hosts of an engine, as rank 0 sees them: processes on other machines that start ranks
there and watch them.

Rank 0 listens while it starts. Each host joins, is told which ranks it has, and opens a connection
for each of them. A host or rank that is lost later ends the engine; the next one listens again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aserve.errors import ConfigError, EngineDead
from aserve.host.environment import installed_version
from aserve.parallel.joining import (
    Control,
    EndRanks,
    FromHost,
    Join,
    JoinAsHost,
    JoinAsRank,
    KillRanks,
    RankEnded,
    RanksLoaded,
    StartRanks,
    WrongKey,
    prove,
    watched,
)
from aserve.parallel.topology import family_of

HOSTS_S = 600.0  # for the hosts to join, whose machines may start later
RANKS_S = 60.0  # for a host to start its ranks
JOIN_S = 5.0  # for the first message of a connection

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Division:
    """Which ranks each host has, by its number, and on which machine each rank is. Rank 0 and those
    of no host are on the machine of rank 0."""

    ranks: Mapping[int, tuple[int, ...]]
    nodes: tuple[int, ...]


def divided(num_ranks: int, num_nodes: int) -> Division:
    """Divides ranks into equal parts of neighbours. Each machine but the first has one host."""
    nodes = tuple(rank * num_nodes // num_ranks for rank in range(num_ranks))
    ranks = {
        node: tuple(rank for rank in range(num_ranks) if nodes[rank] == node)
        for node in range(1, num_nodes)
    }
    return Division(ranks, nodes)


class Entrance:
    """The listening socket at which hosts and their ranks join. Whoever does not know the key is
    sent away."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._key = key
        try:
            self._listener = socket.create_server((host, port), family=family_of(host))
        except OSError as error:
            raise ConfigError(
                f"--dist-init-addr {host}:{port}: cannot listen there: {error}; it has to be an "
                "address of node 0"
            ) from None

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def joined(self, *, until_s: float) -> tuple[Join, socket.socket]:
        """Waits for the next connection of a host or rank. Raises TimeoutError."""
        while True:
            self._listener.settimeout(max(0.001, until_s - time.monotonic()))
            sock, address = self._listener.accept()
            join: Join | None = None
            try:
                prove(sock, self._key, is_leader=True)
                join = Control[Join](sock, Join).receive(JOIN_S)
            except (OSError, WrongKey) as error:
                logger.warning("refused address=%s reason=%s", address[0], error)
            if join is not None:
                return join, watched(sock)
            sock.close()

    def close(self) -> None:
        self._listener.close()


class RemoteHost:
    """The connection to one host."""

    def __init__(self, join: JoinAsHost, sock: socket.socket) -> None:
        self.join = join
        self.control = Control[FromHost](sock, FromHost)
        self.address: str = sock.getpeername()[0]
        self.own_address: str = sock.getsockname()[0]  # at which the host has reached rank 0
        self.heard_s = time.monotonic()  # when the host was last heard of
        self.is_silent = False  # it will not tell how its ranks end
        self._codes: dict[int, int] = {}

    def __str__(self) -> str:
        return f"host {self.join.number} at {self.address}"

    def has_ended(self) -> bool:
        """Reads all that has come, without waiting."""
        with contextlib.suppress(TimeoutError):
            while self._has_read(0):
                pass
            return True
        return False

    def exit_code(self, rank: int, timeout_s: float) -> int:
        """Waits for the end of a rank's process. Raises TimeoutError, at once if the host ends or
        is silent."""
        until_s = time.monotonic() + timeout_s
        while rank not in self._codes:
            if self.is_silent or not self._has_read(until_s - time.monotonic()):
                raise TimeoutError
        return self._codes[rank]

    def _has_read(self, timeout_s: float) -> bool:
        message = self.control.receive(timeout_s)
        self.heard_s = time.monotonic()
        if isinstance(message, RankEnded):
            self._codes[message.rank] = message.code
        return message is not None


class RemoteProcess:
    """The process of a rank on another machine, with the methods of subprocess.Popen that count."""

    def __init__(self, host: RemoteHost, rank: int) -> None:
        self.returncode: int | None = None
        self._host = host
        self._rank = rank

    def wait(self, timeout: float) -> int:
        try:
            self.returncode = self._host.exit_code(self._rank, timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(str(self._host), timeout) from None
        return self.returncode

    def kill(self) -> None:
        """Kills all ranks of the host."""
        self._host.control.send(KillRanks())


class Hosts:
    """All hosts of an engine, and the connections of their ranks. `on_close` is called in the end,
    once. An engine on one machine has none."""

    def __init__(self) -> None:
        self.division = Division({}, ())
        self.members: dict[int, RemoteHost] = {}
        self.connections: dict[int, socket.socket] = {}  # by rank, until the rank has it
        self.on_close: Callable[[], None] | None = None
        self._launch = ""

    def join(self, entrance: Entrance, division: Division, launch: str) -> None:
        """Waits for the hosts and then for their ranks. Raises EngineDead if some do not come."""
        self.division, self._launch = division, launch
        until_s = time.monotonic() + HOSTS_S
        while missing := self._missing():
            logger.info("waiting for hosts of ranks numbers=%s", missing)
            try:
                self._add(*entrance.joined(until_s=until_s))
            except TimeoutError:
                raise EngineDead(f"hosts {missing} did not join in {HOSTS_S:.0f} s") from None
        for number, host in self.members.items():
            host.control.send(StartRanks(launch, division.ranks[number], self.folder_of(host)))
        self._connect(entrance)

    def host_of(self, rank: int) -> RemoteHost | None:
        """None: the rank is a process of this machine."""
        ranks = self.division.ranks
        return next((self.members[n] for n, held in ranks.items() if rank in held), None)

    def folder_of(self, host: RemoteHost) -> str:
        """The folder that the ranks of the host's machine share."""
        return f"{host.join.shared_folder}/{self._launch}"

    def note_silent(self, for_s: float) -> RemoteHost | None:
        """Returns a host of which nothing was heard for so long, and notes that it is silent."""
        until_s = time.monotonic() - for_s
        found = next((host for host in self.members.values() if host.heard_s < until_s), None)
        if found is not None:
            found.is_silent = True
        return found

    def ranks_loaded(self) -> None:
        for host in self.members.values():
            host.control.send(RanksLoaded())

    def end(self, *, is_over: bool, reason: str = "") -> None:
        """Tells the hosts that the engine ends. With `is_over` no other follows."""
        for host in self.members.values():
            host.control.send(EndRanks(is_over, reason))

    def close(self) -> None:
        for host in self.members.values():
            host.control.close()
        for connection in self.connections.values():
            connection.close()
        self.members, self.connections = {}, {}
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    def _missing(self) -> list[int]:
        """The hosts that have not joined, or have left again."""
        for number, host in list(self.members.items()):
            if host.has_ended():
                host.control.close()
                del self.members[number]
        return sorted(self.division.ranks.keys() - self.members.keys())

    def _add(self, join: Join, sock: socket.socket) -> None:
        if isinstance(join, JoinAsRank):  # of an engine that has died
            sock.close()
            return
        host, own, expected = RemoteHost(join, sock), _version(), self._missing()
        reason = ""
        if join.version != own:
            reason = f"{host} has aserve {join.version}, and node 0 has {own}; install the same"
        elif join.number not in expected:
            reason = f"{host} is one too many: only {expected} are still expected"
        if not reason:
            self.members[join.number] = host
            return
        logger.warning("refused reason=%s", reason)
        host.control.send(EndRanks(is_over=True, reason=reason))
        host.control.close()

    def _connect(self, entrance: Entrance) -> None:
        wanted = {rank for ranks in self.division.ranks.values() for rank in ranks}
        until_s = time.monotonic() + RANKS_S
        while missing := wanted - self.connections.keys():
            try:
                join, sock = entrance.joined(until_s=until_s)
            except TimeoutError:
                raise EngineDead(
                    f"the hosts of ranks {sorted(missing)} did not start them in {RANKS_S:.0f} s"
                ) from None
            match join:
                case JoinAsRank(launch=self._launch, rank=rank) if rank in missing:
                    self.connections[rank] = sock
                case _:
                    sock.close()


def _version() -> str:
    return installed_version("aserve") or "from its source"
