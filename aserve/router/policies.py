"""Load-balancing policies: each chooses one replica for a request, from those that may get it.

A policy is a function of values. The balancer keeps the state that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, TypeAlias

from aserve.config import RouterOptions
from aserve.router.prefixes import PrefixIndex

MOST_LOAD = 1.25  # times the mean load, for a replica that is chosen by a hash
MIX, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # an odd factor, whose high bits depend on all bits


@dataclass(frozen=True, slots=True)
class Demand:
    """Describes a request to the policies. `owner` is the replica that has the state which the
    request names, and an empty text if it names none.
    """

    digests: tuple[bytes, ...] = ()
    session: str = ""
    owner: str = ""


class Candidate(Protocol):
    """A replica that may get the request."""

    @property
    def name(self) -> str: ...

    @property
    def load(self) -> int: ...

    @property
    def seed(self) -> int:
        """A hash of the name, of 64 bits."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Describes the replicas to a policy. `turn` counts the choices so far."""

    candidates: Sequence[Candidate]
    index: PrefixIndex
    options: RouterOptions
    turn: int


Policy: TypeAlias = Callable[[Demand, Scene], str]


def round_robin(_: Demand, scene: Scene) -> str:
    return scene.candidates[scene.turn % len(scene.candidates)].name


def least_load(_: Demand, scene: Scene) -> str:
    """Chooses the replica with the fewest open requests; equal ones take turns."""
    least = min(candidate.load for candidate in scene.candidates)
    idle = [candidate.name for candidate in scene.candidates if candidate.load == least]
    return idle[scene.turn % len(idle)]


def session(demand: Demand, scene: Scene) -> str:
    """Chooses by rendezvous hashing, so that a replica that joins or leaves moves only its own
    share of the sessions. A request without a session goes to the least loaded replica.
    """
    if not demand.session:
        return least_load(demand, scene)
    names = [candidate.name for candidate in scene.candidates]
    return max(names, key=lambda name: blake2b(f"{name}\0{demand.session}".encode()).digest())


def cache_aware(demand: Demand, scene: Scene) -> str:
    """Chooses the replica with the longest cached prefix, unless loads differ too much.

    The thresholds are those of SGLang's router. Loads differ too much when the highest exceeds the
    lowest by more than `balance_abs_threshold` and by the factor `balance_rel_threshold`; then the
    least loaded replica is chosen. When the best match is no more than `cache_threshold` of the
    prompt, so much of it has a home, which is the same for all routers.
    """
    digests, options, index = demand.digests, scene.options, scene.index
    loads = [candidate.load for candidate in scene.candidates]
    if not digests or is_imbalanced(min(loads), max(loads), options):
        return least_load(demand, scene)
    holders = index.holders(digests[0])
    matches = [
        (index.match_len(each.name, digests), -each.load, each.name)
        for each in scene.candidates
        if each.name in holders
    ]
    if matches:
        matched, _, name = max(matches, key=lambda match: match[:2])
        if matched > options.cache_threshold * len(digests):
            return name
    digest = digests[min(int(options.cache_threshold * len(digests)), len(digests) - 1)]
    return _home(digest, scene.candidates, sum(loads) / len(loads))


def _home(digest: bytes, candidates: Sequence[Candidate], mean_load: float) -> str:
    """Chooses by rendezvous hashing with bounded loads, so that routers that do not hear of each
    other send equal beginnings to the same replica. One that has more than its share is left out.

    Source: https://arxiv.org/abs/1608.01350, whose bound is c times the mean load.
    """
    most = MOST_LOAD * mean_load + 1
    key = int.from_bytes(digest)
    free = [each for each in candidates if each.load <= most]
    return max(free, key=lambda each: (each.seed ^ key) * MIX & MASK).name


def is_imbalanced(low: int, high: int, options: RouterOptions) -> bool:
    return high - low > options.balance_abs_threshold and high > low * options.balance_rel_threshold


POLICIES: Mapping[str, Policy] = {
    "cache_aware": cache_aware,
    "least_load": least_load,
    "round_robin": round_robin,
    "session": session,
}
