"""Ranks that Ray places: each has an actor on a machine of the cluster, which is its rank host.

Ray chooses the machines, starts the actors there and ends them with the engine's process. Steps and
collectives go by the connections of the ranks, and never through Ray.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import msgspec

from aserve.config import Resolved
from aserve.errors import ConfigError, EngineDead
from aserve.host.logs import start_logging
from aserve.host.threads import Worker
from aserve.parallel.hosts import HOSTS_S, Division
from aserve.parallel.joining import Leader
from aserve.parallel.rank_host import host_ranks, join_of

PLACE_S = 600.0  # for the cluster to have room, which may start machines for it
RESOURCE = "CPU"  # of which each rank needs one
PIN = 0.001  # of the resource that stands for a machine

logger = logging.getLogger(__name__)


class RankActor:
    """The host of one rank, as an actor of Ray."""

    def node(self) -> str:
        """The id of the machine in the cluster."""
        import ray

        found: str = ray.get_runtime_context().get_node_id()
        return found

    def host(self, leader: tuple[str, int, str], settings: bytes, rank: int) -> None:
        """Begins to host the rank. Raises ConfigError if this machine has no such model.

        NOTE: Ray ends the actors of a machine that it has lost, but only between two calls.
        """
        resolved = msgspec.msgpack.decode(settings, type=Resolved)
        start_logging(resolved.debug.log_level or "info", resolved.debug.log_format)
        join = join_of(resolved, rank)

        def work() -> None:
            host_ranks(Leader(*leader), join, wait_s=HOSTS_S)

        Worker("host", work, on_end=_log_end).start()


def _log_end(error: BaseException | None) -> None:
    if error is not None:
        logger.error("the host ends: %s", error)


class RayCluster:
    """The cluster that this process is connected to, and the actors of one engine in it."""

    def __init__(self) -> None:
        """Connects to the cluster of RAY_ADDRESS, or of this machine. Raises ConfigError."""
        if find_spec("ray") is None:
            raise ConfigError(
                "--distributed-executor-backend ray needs Ray on all machines: "
                "pip install 'aserve[ray]'"
            )
        import ray

        try:
            ray.init(address="auto", configure_logging=False, ignore_reinit_error=True)
        except ConnectionError as error:
            raise ConfigError(
                f"--distributed-executor-backend ray: there is no Ray cluster: {error}; run `ray "
                "start --head` here, or set RAY_ADDRESS"
            ) from None
        self.address: str = ray.util.get_node_ip_address()
        self._actors: list[Any] = []
        self._group: Any = None

    def placed(self, num_ranks: int) -> Division:
        """Places all ranks, those of one machine side by side where it has room. Rank 0 is this
        process. Raises EngineDead if there is no room in time."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [{RESOURCE: 1.0} for _ in range(num_ranks)]
        bundles[0][f"node:{self.address}"] = PIN
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(PLACE_S):
            raise EngineDead(
                f"the Ray cluster had no room for {num_ranks} ranks in {PLACE_S:.0f} s; each needs "
                f"one {RESOURCE}, and rank 0 one on this machine ({ray.available_resources()})"
            )
        make = ray.remote(RankActor)
        for index in range(1, num_ranks):
            strategy = PlacementGroupSchedulingStrategy(self._group, index)
            options = make.options(num_cpus=1, max_restarts=0, scheduling_strategy=strategy)
            self._actors.append(options.remote())
        own = ray.get_runtime_context().get_node_id()
        found = self._await([actor.node.remote() for actor in self._actors])
        ids = [own, *found]
        nodes = tuple(ids.index(each) for each in ids)
        return Division({rank: (rank,) for rank in range(1, num_ranks)}, nodes)

    def run(self, leader: tuple[str, int, str], resolved: Resolved) -> None:
        """Lets the actors join rank 0. Raises EngineDead if one cannot."""
        settings = msgspec.msgpack.encode(resolved)
        self._await([a.host.remote(leader, settings, n) for n, a in enumerate(self._actors, 1)])

    def _await(self, calls: list[Any]) -> list[Any]:
        import ray

        try:
            found: list[Any] = ray.get(calls, timeout=HOSTS_S)
        except ray.exceptions.RayTaskError as error:
            raise EngineDead(f"a rank cannot start on its machine: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise EngineDead(f"Ray could not start the hosts of the ranks: {error}") from error
        return found

    def close(self) -> None:
        """Ends the actors and leaves the cluster."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()
