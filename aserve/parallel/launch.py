"""The start of all ranks but rank 0: on its machine, on those of --nnodes, or by Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from aserve.config import DisaggregationOptions, Resolved, RouterOptions, ServerOptions
from aserve.options.node_options import NodeOptions
from aserve.parallel.hosts import Entrance, Hosts, RemoteHost, RemoteProcess, divided
from aserve.parallel.processes import RankProcess, memory_folder, shared_folder, spawned_rank
from aserve.parallel.topology import MEET_S, Cluster, Coordinates, StartRank, family_of


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that were started, and the place of rank 0 among them. `store` is a socket that
    listens for ranks of several machines, which find each other there."""

    place: Coordinates
    ranks: tuple[RankProcess, ...]
    hosts: Hosts
    store: socket.socket | None


def first_place(resolved: Resolved, *, store: str) -> Coordinates:
    """Returns the place of rank 0. WHY: on a cluster whose files are on a slow disk one machine may
    import its libraries minutes behind the others.
    """
    return Coordinates(
        num_ranks=resolved.num_ranks,
        store=store,
        num_stages=resolved.machine.pipeline_parallel_size,
        has_own_rows=resolved.dp_size > 1,
        meet_s=max(MEET_S, resolved.machine.ranks_timeout),
    )


@contextlib.contextmanager
def started_ranks(resolved: Resolved, model_dir: Path) -> Iterator[Team]:
    """Starts all ranks but the first one. It ends them if the block raises, and only then. The
    files by which ranks of one machine meet are there within the block."""
    launch = f"aserve-ranks-{secrets.token_hex(8)}"
    with (
        contextlib.ExitStack() as undo,
        shared_folder(os.path.join(memory_folder(), launch)) as folder,
    ):
        hosts = Hosts()
        undo.push(_end_of(hosts))
        _join(hosts, resolved, launch)
        place = first_place(resolved, store=f"{folder}/store")
        cluster, store = _cluster_of(hosts)
        if store is not None:
            undo.callback(store.close)
        place = msgspec.structs.replace(place, cluster=cluster)
        start = StartRank(resolved, str(model_dir), os.getcwd(), place)
        ranks = []
        for number in range(1, place.num_processes):
            rank = _started(start, number, hosts)
            undo.callback(rank.close)
            ranks.append(rank)
        yield Team(place, tuple(ranks), hosts, store)
        hosts.ranks_loaded()
        undo.pop_all()


def _join(hosts: Hosts, resolved: Resolved, launch: str) -> None:
    """Lets the hosts of other machines join."""
    nodes = resolved.nodes
    if nodes.is_alone:
        return
    if nodes.uses_ray:
        from aserve.parallel.on_ray import RayCluster

        cluster, key = RayCluster(), secrets.token_hex(32)
        hosts.on_close = cluster.close
        division = cluster.placed(resolved.num_processes)
        with contextlib.closing(Entrance(cluster.address, 0, key)) as entrance:
            cluster.run((cluster.address, entrance.port, key), resolved)
            hosts.join(entrance, division, launch)
        return
    division = divided(resolved.num_processes, nodes.nnodes)
    with contextlib.closing(Entrance(*nodes.address, nodes.dist_key or "")) as entrance:
        hosts.join(entrance, division, launch)


def _cluster_of(hosts: Hosts) -> tuple[Cluster | None, socket.socket | None]:
    """Returns the machines of the ranks, as rank 0 needs them, and a listening socket for what
    they find each other by. None: there is one machine."""
    nodes = hosts.division.nodes
    if len(set(nodes)) < 2:
        return None, None
    own = next(iter(hosts.members.values())).own_address
    store = socket.create_server((own, 0), family=family_of(own))
    return Cluster(nodes, own, own, store.getsockname()[1]), store


def _started(start: StartRank, number: int, hosts: Hosts) -> RankProcess:
    place = msgspec.structs.replace(start.coordinates, rank=number)
    host = hosts.host_of(number)
    if host is None:
        return spawned_rank(msgspec.structs.replace(start, coordinates=place))
    remote = _remote_start(start, place, host, folder=hosts.folder_of(host))
    process = RemoteProcess(host, number)
    return RankProcess(remote, hosts.connections.pop(number), process, where=f" ({host})")


def _remote_start(
    start: StartRank, place: Coordinates, host: RemoteHost, *, folder: str
) -> StartRank:
    """Returns what a rank of another machine is told: paths and addresses are those of its machine,
    and no secret travels that it does not need."""
    if place.cluster is not None:
        cluster = msgspec.structs.replace(place.cluster, host=host.address)
        place = msgspec.structs.replace(place, cluster=cluster)
    resolved = dataclasses.replace(
        start.resolved,
        nodes=NodeOptions(),
        server=ServerOptions(),
        router=RouterOptions(),
        disaggregation=DisaggregationOptions(),
    )
    return StartRank(
        resolved,
        host.join.model_dir,
        host.join.directory,
        msgspec.structs.replace(place, store=f"{folder}/store"),
    )


def _end_of(
    hosts: Hosts,
) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], bool]:
    def end(_: object, error: BaseException | None, __: object) -> bool:
        hosts.end(is_over=True, reason=str(error) or repr(error))
        hosts.close()
        return False

    return end
