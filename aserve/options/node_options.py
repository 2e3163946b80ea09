"""Options of an engine whose ranks are on several machines, and what has to fit together."""

from __future__ import annotations

from dataclasses import dataclass

from aserve.errors import ConfigError
from aserve.options.option import Limits, host_and_port, option


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of an engine whose ranks are on several machines."""

    nnodes: int = option(
        1,
        "machines among which the ranks of the engine are divided; the same command runs on each, "
        "with its --node-rank",
        Limits(low=1, high=64),
    )
    node_rank: int = option(
        0,
        "number of this machine; 0 has the scheduler and serves clients, others run ranks for it",
        Limits(low=0, high=63),
    )
    dist_init_addr: str | None = option(
        None,
        "address of node 0 at which the others join it",
        Limits(metavar="HOST:PORT", aliases=("nccl-init-addr",)),
    )
    dist_key: str | None = option(
        None,
        "a secret that all nodes must have; what travels is not encrypted",
        Limits(metavar="KEY", is_secret=True),
    )
    distributed_executor_backend: str = option(
        "mp",
        "mp: ranks are processes of this machine, or of those of --nnodes; ray: a Ray cluster "
        "places them on its machines and watches them (needs aserve[ray])",
        Limits(choices=("mp", "ray"), value_aliases={"uni": "mp"}),
    )

    @property
    def uses_ray(self) -> bool:
        return self.distributed_executor_backend == "ray"

    @property
    def is_alone(self) -> bool:
        """Whether all ranks are processes of this machine."""
        return self.nnodes == 1 and not self.uses_ray

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of --dist-init-addr. Raises ConfigError."""
        try:
            return host_and_port(self.dist_init_addr or "")
        except ValueError:
            raise ConfigError(
                f"--dist-init-addr {self.dist_init_addr or 'is not given, and'} has to be "
                f"HOST:PORT of node 0, the same for all of --nnodes {self.nnodes}"
            ) from None


def check_nodes(nodes: NodeOptions, *, num_ranks: int, num_servers: int, sleeps: bool) -> None:
    """Raises ConfigError for options that do not fit together. `num_ranks` are those of an engine,
    and `num_servers` those behind a router."""
    count = nodes.nnodes
    if nodes.node_rank >= count:
        raise ConfigError(
            f"--node-rank {nodes.node_rank} is not below --nnodes {count}: nodes count from 0"
        )
    if nodes.is_alone:
        return
    if nodes.uses_ray and count > 1:
        raise ConfigError(
            f"--nnodes {count} and --distributed-executor-backend ray: Ray chooses the machines; "
            "leave one out"
        )
    if num_servers > 1:
        raise ConfigError(f"--replicas {num_servers} are servers of one machine; leave it out")
    if nodes.uses_ray:
        return
    if sleeps:
        raise ConfigError(
            f"--sleep-idle-seconds with --nnodes {count}: the other nodes end with the engine; "
            "leave it out"
        )
    host_and_port = nodes.address
    assert host_and_port
    if num_ranks % count:
        raise ConfigError(
            f"--nnodes {count}: {num_ranks} ranks (--tensor-parallel-size times "
            "--pipeline-parallel-size) cannot be divided among as many machines"
        )
    if not nodes.dist_key:
        raise ConfigError(
            f"--nnodes {count} needs --dist-key, the same secret on all nodes; better in the "
            "variable ASERVE_DIST_KEY, which `ps` does not show"
        )
