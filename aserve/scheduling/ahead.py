"""Finds what comes before a request that would now join the queue. Nothing here changes the state.

The order is that of `WaitingQueue`: priority, then the client that was served least, then arrival.
A client's key grows by the prompts of its sequences as they are admitted, so of another client's
sequences those come first that are admitted before its key passes the key which this client will
have after its own waiting sequences.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from aserve.messages.base import num_values
from aserve.messages.requests import AdmitRequest
from aserve.scheduling.clients import PROMPT_WEIGHT, Client
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState


class Place(NamedTuple):
    """A sequence that waits or runs. It has `max_tokens` outputs in the end if it `runs_to_max`,
    because nothing that it samples ends it.
    """

    priority: int
    client_id: str
    num_tokens: int  # to compute before its next output
    num_outputs: int
    max_tokens: int
    runs_to_max: bool

    def steps_left(self, mean_outputs: float | None) -> float | None:
        """Returns the decode steps that are expected until its end. None if nothing is known of the
        length of answers.
        """
        if self.runs_to_max:
            return max(1, self.max_tokens - self.num_outputs)
        if mean_outputs is None:
            return None
        return max(1.0, min(mean_outputs, self.max_tokens) - self.num_outputs)


class Snapshot(NamedTuple):
    """The sequences that wait and run between two ticks. All requests of a tick share one."""

    state: SchedulerState
    waiting: list[Place]  # in order of arrival
    running: list[Place]
    clients: dict[str, Client]  # the active ones


class Ahead(NamedTuple):
    """The work that comes before a request: the waiting sequences, and the prompt tokens of these
    and of rows that still compute their prompts. Of the rows `num_free` are free, and the others
    are `running`. The request has a claim if its client has less than its share: then a row is
    taken from another.
    """

    places: list[Place]
    num_tokens: int
    num_free: int
    running: list[Place]
    has_claim: bool = False

    @property
    def is_nothing(self) -> bool:
        return not self.places and not self.num_tokens and (self.num_free > 0 or self.has_claim)

    def steps_to_row(self, mean_outputs: float | None) -> float | None:
        """Returns the number of decode steps until a row is free. The sequences that wait before it
        take the rows that end first. None if somebody's length is not known.
        """
        if self.has_claim or len(self.places) < self.num_free:
            return 0.0
        steps = [place.steps_left(mean_outputs) for place in (*self.running, *self.places)]
        known = [each for each in steps if each is not None]
        if len(known) < len(steps):
            return None
        ends = [0.0] * self.num_free + known[: len(self.running)]
        if not ends:
            return 0.0
        heapq.heapify(ends)
        for num_steps in known[len(self.running) :]:
            heapq.heapreplace(ends, ends[0] + num_steps)
        return ends[0]


def snapshot_of(state: SchedulerState) -> Snapshot:
    waiting = [each for each in state.living() if each.phase is Phase.WAITING]
    waiting.sort(key=lambda sequence: sequence.arrival)
    return Snapshot(
        state=state,
        waiting=[*map(_place_of, waiting)],
        running=[*map(_place_of, state.running.values())],
        clients={each.client.client_id: each.client for each in state.living()},
    )


def ahead_of(
    snapshot: Snapshot, request: AdmitRequest, *, earlier: Iterable[AdmitRequest] = ()
) -> Ahead:
    """Returns what comes before `request`, where those `earlier` join the queue before it."""
    state = snapshot.state
    places = snapshot.waiting + [
        place for each in earlier for place in [place_of(each)] * each.sampling.n
    ]
    client = state.clients.find(request.client)
    active = {**snapshot.clients, request.client: client}
    key = _key_on_joining(client, snapshot.clients.values())
    before = _before(place_of(request), places, active, key)
    num_tokens = sum(place.num_tokens for place in before)
    num_tokens += sum(
        row.remaining
        for row in _prefills(state)
        if (row.priority, row.client.served, row.client is not client) < (request.priority, key, 1)
    )
    return Ahead(
        places=before,
        num_tokens=num_tokens,
        num_free=_num_free(state, request),
        running=snapshot.running,
        has_claim=_has_claim(state, client, active, num_own=_num_of(request.client, before)),
    )


def everything(snapshot: Snapshot) -> Ahead:
    """Returns what comes before a request that would join the end of the queue."""
    state, waiting = snapshot.state, snapshot.waiting
    num_tokens = sum(place.num_tokens for place in waiting)
    num_tokens += sum(row.remaining for row in _prefills(state))
    return Ahead(waiting, num_tokens, state.rows.num_free, snapshot.running)


def place_of(request: AdmitRequest) -> Place:
    """Returns the place of each child of a request."""
    num_outputs = max(map(num_values, request.outputs), default=0)
    return Place(
        request.priority,
        request.client,
        num_values(request.prompt_ids) + num_outputs,
        num_outputs,
        request.sampling.max_tokens or 0,
        not request.end_ids,
    )


def num_cached(state: SchedulerState, request: AdmitRequest) -> int:
    """Returns the prompt tokens in the prefix cache, of the pages whose keys came with it."""
    if not state.spec.prefix_cache or not request.page_keys or not request.is_causal:
        return 0
    client = state.clients.find(request.client)
    sequence = Sequence(request, child=0, arrival=0, client=client, caps=state.spec.decode)
    most = min(sequence.max_cached_len // state.spec.page_size, len(sequence.keys))
    return state.cache.match(sequence.keys, most=most).num_pages * state.spec.page_size


def _place_of(sequence: Sequence) -> Place:
    return Place(
        sequence.priority,
        sequence.client.client_id,
        sequence.remaining,
        sequence.num_outputs,
        sequence.max_tokens,
        not sequence.end_ids,
    )


def _key_on_joining(client: Client, active: Iterable[Client]) -> int:
    """Returns the client's key when it joins: see `Clients.join`."""
    if client.num_living:
        return client.key
    return max(client.served, min((each.served for each in active), default=0))


def _before(mine: Place, places: list[Place], clients: dict[str, Client], key: int) -> list[Place]:
    """Returns the places that come before mine, where `key` is that of my client."""
    level = [place for place in places if place.priority == mine.priority]
    own = [place for place in level if place.client_id == mine.client_id]
    key += PROMPT_WEIGHT * sum(place.num_tokens for place in own)
    before = [place for place in places if place.priority < mine.priority] + own
    keys: defaultdict[str, int] = defaultdict(int)
    keys.update({name: each.key for name, each in clients.items()})
    for place in level:
        if place.client_id == mine.client_id:
            continue
        if keys[place.client_id] <= key:
            before.append(place)
        keys[place.client_id] += PROMPT_WEIGHT * place.num_tokens
    return before


def _prefills(state: SchedulerState) -> list[Sequence]:
    """Returns the running rows whose prompts are not computed yet."""
    root_len = state.spec.decode.root_len
    return [row for row in state.running.values() if row.remaining > root_len]


def _num_free(state: SchedulerState, request: AdmitRequest) -> int:
    """Returns the number of sequences like this one for which there are rows and pages."""
    pages = state.num_pages(num_values(request.prompt_ids) + 1)
    cache = state.cache
    first_pools = [cache.pools_of(rank)[0] for rank in range(state.spec.dp_size)]
    return min(state.rows.num_free, sum(cache.available(pool) // pages for pool in first_pools))


def _has_claim(
    state: SchedulerState, client: Client, active: dict[str, Client], *, num_own: int
) -> bool:
    """Whether a row is taken from another client for the request: see make_way.py."""
    share = max(1, state.spec.max_rows // len(active))
    return client.num_rows + num_own < share and any(
        each.num_rows > share for each in active.values() if each is not client
    )


def _num_of(client_id: str, places: list[Place]) -> int:
    return sum(place.client_id == client_id for place in places)
