"""Decides which replica gets a request. It is told of requests and probes, and does no I/O.

A replica gets new requests while it is healthy and not draining.
- It becomes healthy with the first probe that succeeds.
- It becomes unhealthy when its port refuses a connection, or after `max_failures` failures of
  requests and probes in a row (a circuit breaker); the next probe that succeeds closes the breaker.
- A draining replica keeps its open requests and those about state that it owns. One that was
  removed leaves when its last request has ended.

`Balancer` alone writes the state of the replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b

from aserve.config import RouterOptions
from aserve.router.policies import POLICIES, Demand, Scene
from aserve.router.prefixes import PrefixIndex

RETRY_SHARE = 0.2  # retries per request in the long run, so that retries do not add up to an outage
MAX_RETRY_CREDIT = 100.0


@dataclass(slots=True)
class Replica:
    """`elsewhere` is the load that the replica reports beyond the requests of this router."""

    name: str
    in_flight: int = 0
    elsewhere: int = 0
    failures: int = 0  # in a row
    is_healthy: bool = False
    is_draining: bool = False
    is_removed: bool = False
    seed: int = 0  # a hash of the name, of 64 bits

    def __post_init__(self) -> None:
        self.seed = int.from_bytes(blake2b(self.name.encode(), digest_size=8).digest())

    @property
    def is_open(self) -> bool:
        """Whether it gets new requests."""
        return self.is_healthy and not (self.is_draining or self.is_removed)

    @property
    def load(self) -> int:
        return self.in_flight + self.elsewhere

    @property
    def state(self) -> str:
        if self.is_removed or self.is_draining:
            return "draining"
        return "healthy" if self.is_healthy else "unhealthy"


@dataclass(slots=True)
class PrefixHits:
    """Blocks of all prompts, and those of them that their replica was believed to have cached."""

    num_blocks: int = 0
    num_matched: int = 0


class Balancer:
    def __init__(self, options: RouterOptions, names: Iterable[str] = ()) -> None:
        self.hits = PrefixHits()
        self._options = options
        self._policy = POLICIES[options.policy]
        self._index = PrefixIndex(options.max_prefix_blocks)
        self._replicas: dict[str, Replica] = {}
        self._turn = 0
        self._retry_credit = MAX_RETRY_CREDIT
        for name in names:
            self.add(name)

    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    def find(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    def add(self, name: str) -> bool:
        """Adds a replica, or takes back one that drains. Returns False if nothing has changed."""
        known = self._replicas.get(name)
        if known is None:
            self._replicas[name] = Replica(name)
            return True
        was_leaving = known.is_draining or known.is_removed
        known.is_draining = known.is_removed = False
        return was_leaving

    def drain(self, name: str) -> None:
        self._replicas[name].is_draining = True

    def remove(self, name: str) -> None:
        self._replicas[name].is_removed = True
        self._drop_if_idle(name)

    def pick(self, demand: Demand, *, excluded: Collection[str] = ()) -> str | None:
        """Returns the name of a replica, or None if no replica can serve the request. The owner of
        a request's state is not replaced by another replica.
        """
        if demand.owner:
            owner = self._replicas.get(demand.owner)
            return demand.owner if owner is not None and demand.owner not in excluded else None
        candidates = [
            replica
            for replica in self._replicas.values()
            if replica.is_open and replica.name not in excluded
        ]
        if not candidates:
            return None
        self._turn += 1
        return self._policy(demand, Scene(candidates, self._index, self._options, self._turn))

    def start(self, name: str, demand: Demand) -> None:
        """A request goes to the replica. `end` follows exactly once."""
        self._replicas[name].in_flight += 1
        self._retry_credit = min(MAX_RETRY_CREDIT, self._retry_credit + RETRY_SHARE)
        if demand.digests:
            self.hits.num_blocks += len(demand.digests)
            self.hits.num_matched += self._index.match_len(name, demand.digests)
            self._index.add(name, demand.digests)

    def end(self, name: str) -> None:
        self._replicas[name].in_flight -= 1
        self._drop_if_idle(name)

    def may_retry(self, num_tried: int) -> bool:
        """Returns whether a request that was tried so often may be sent again, and counts that."""
        if num_tried > self._options.max_retries or self._retry_credit < 1:
            return False
        self._retry_credit -= 1
        return True

    def succeeded(self, name: str) -> None:
        """The replica has answered a request. This does not make an unhealthy one healthy."""
        replica = self._replicas.get(name)
        if replica is not None and replica.is_healthy:
            replica.failures = 0

    def failed(self, name: str, *, is_down: bool = False) -> None:
        """A request or a probe of the replica has failed. `is_down` says that its port is closed,
        which needs no second failure, and its cache is gone.
        """
        replica = self._replicas.get(name)
        if replica is None:
            return
        replica.failures += 1
        if is_down:
            self._index.forget(name)
        if is_down or replica.failures >= self._options.max_failures:
            replica.is_healthy = False

    def probed(self, name: str, *, load: int | None) -> None:
        """A probe has succeeded; `load` is what the replica says about its open requests."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        replica.is_healthy = True
        replica.failures = 0
        if load is not None:
            replica.elsewhere = max(0, load - replica.in_flight)

    def _drop_if_idle(self, name: str) -> None:
        replica = self._replicas[name]
        if replica.is_removed and not replica.in_flight:
            del self._replicas[name]
            self._index.forget(name)
