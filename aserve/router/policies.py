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


@dataclass(frozen=True, slots=True)
class Demand:
    """What the policies know of a request. `owner` is the replica that has the state which the
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


@dataclass(frozen=True, slots=True)
class Scene:
    """What the balancer tells a policy beside the request. `turn` counts the choices so far."""

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
    least loaded replica is chosen. It is also chosen when the best match is no more than
    `cache_threshold` of the prompt, where equal loads go to the replica with the fewest blocks.
    """
    loads = [candidate.load for candidate in scene.candidates]
    options = scene.options
    if is_imbalanced(min(loads), max(loads), options) or not demand.digests:
        return least_load(demand, scene)
    index = scene.index
    best = max(
        scene.candidates,
        key=lambda each: (index.match_len(each.name, demand.digests), -each.load),
    )
    matched = index.match_len(best.name, demand.digests)
    if matched > options.cache_threshold * len(demand.digests):
        return best.name
    return min(scene.candidates, key=lambda each: (each.load, index.num_blocks(each.name))).name


def is_imbalanced(low: int, high: int, options: RouterOptions) -> bool:
    return high - low > options.balance_abs_threshold and high > low * options.balance_rel_threshold


POLICIES: Mapping[str, Policy] = {
    "cache_aware": cache_aware,
    "least_load": least_load,
    "round_robin": round_robin,
    "session": session,
}
