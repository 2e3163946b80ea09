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

HOME_LOAD = 1.25  # times the mean load, for a replica that is chosen by a hash
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
    def in_flight(self) -> int:
        """Open requests of this router."""

    @property
    def elsewhere(self) -> int:
        """Open requests of others, as the replica has last reported them."""

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
    """Chooses the replica with the longest cached prefix, unless it is full.

    It is full if its load exceeds the lowest one by more than `balance_abs_threshold` and by the
    factor `balance_rel_threshold`, which are SGLang's names. When the best match is no more than
    `cache_threshold` of the prompt, so much of it has a home, which is the same for all routers.
    Replicas with equal matches are asked in the order in which they are homes.
    """
    digests, options = demand.digests, scene.options
    if not digests:
        return least_load(demand, scene)
    own = min(int(options.cache_threshold * len(digests)), len(digests) - 1)
    key = int.from_bytes(digests[own])
    loads = [each.in_flight + each.elsewhere for each in scene.candidates]
    low, mean = min(loads), sum(loads) / len(loads)
    limit = max(low + options.balance_abs_threshold, low * options.balance_rel_threshold)
    for each in _by_score(_holders(digests, scene), key):
        if _has_room(each, limit, scene.turn):
            return each.name
    return _home(key, scene, HOME_LOAD * mean + 1)


def _holders(digests: Sequence[bytes], scene: Scene) -> list[Candidate]:
    """Returns the replicas with the longest match, if it is more than `cache_threshold`."""
    names = scene.index.holders(digests[0])
    if not names:
        return []
    lengths = [
        (each, scene.index.match_len(each.name, digests))
        for each in scene.candidates
        if each.name in names
    ]
    most = max((length for _, length in lengths), default=0)
    if most <= scene.options.cache_threshold * len(digests):
        return []
    return [each for each, length in lengths if length == most]


def _home(key: int, scene: Scene, limit: float) -> str:
    """Chooses by rendezvous hashing with bounded loads, so that routers that do not hear of each
    other send equal beginnings to the same replica. What has no room there goes to the next one.

    Source: https://arxiv.org/abs/1608.01350, whose bound is c times the mean load.
    """
    first = max(scene.candidates, key=lambda each: _score(each, key))
    if _has_room(first, limit, scene.turn):
        return first.name
    others = _by_score(scene.candidates, key)  # of which one has at most the mean load
    return next(each.name for each in others if _has_room(each, limit, scene.turn))


def _by_score(candidates: Sequence[Candidate], key: int) -> list[Candidate]:
    return sorted(candidates, key=lambda each: _score(each, key), reverse=True)


def _score(each: Candidate, key: int) -> int:
    return (each.seed ^ key) * MIX & MASK


def _has_room(each: Candidate, limit: float, turn: int) -> bool:
    """Returns whether a request may go to the replica. Its requests from this router count as they
    are. The others are those of its last report, and all routers have similar ones: if each of them
    left out a replica that was full, it would be empty until the next report, and then full again.
    So they count by a random share, and a replica with twice its limit keeps half of its requests.
    """
    share = ((turn * MIX ^ each.seed) * MIX & MASK) / (MASK + 1)
    return each.in_flight + share * each.elsewhere <= limit


POLICIES: Mapping[str, Policy] = {
    "cache_aware": cache_aware,
    "least_load": least_load,
    "round_robin": round_robin,
    "session": session,
}
