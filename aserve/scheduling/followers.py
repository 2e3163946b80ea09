"""Waiting sequences whose next page is one that a running row, their leader, is about to compute.

A follower waits outside the queue until its leader has committed all pages that both have in
common, or has left its row. So siblings and equal prompts compute a shared page once, and nobody is
looked at in a step in which nothing has changed for it. Only a leader of the same or better
priority is followed. Writes `SchedulerState.leaders`, `SchedulerState.num_followers`, and the
`followers`, `leader` and `next_key` of sequences.
"""

from __future__ import annotations

from aserve.scheduling.checkpoints import ask_checkpoint
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState


def lead(state: SchedulerState, row: Sequence, *, num_committed: int) -> None:
    """Names the row, which has committed so many pages, as the one that will commit its next one,
    if that page's tokens are known.
    """
    if not state.spec.prefix_cache:
        return
    if row.next_key is not None:
        _resign(state, row)
    if num_committed < len(row.keys):
        row.next_key = row.keys[num_committed]
        state.leaders.setdefault(row.next_key, row)


def follow(state: SchedulerState, sequence: Sequence, *, num_cached: int, most: int) -> bool:
    """Makes the sequence wait for a running row that is about to compute its next page, if there
    is one, and returns whether it does. `num_cached` of its first `most` pages are in the cache.
    """
    if num_cached >= most:
        return False
    leader = state.leaders.get(sequence.keys[num_cached])
    if leader is None or leader.priority > sequence.priority:
        return False
    num_alike = sequence.keys.num_common(leader.keys, start=num_cached + 1, stop=most)
    if state.cache.states is not None:
        num_alike = ask_checkpoint(state, leader, num_cached=num_cached, num_alike=num_alike)
        if not num_alike:
            return False
    if leader.followers is None:
        leader.followers = {}
    leader.followers[sequence] = num_alike
    sequence.leader = leader
    state.num_followers += 1
    return True


def wake(state: SchedulerState, leader: Sequence) -> None:
    """After a commit: followers whose shared pages are all there wait in the queue again."""
    assert leader.followers is not None
    num_pages = leader.cacheable_len // state.spec.page_size
    ready = [follower for follower, needs in leader.followers.items() if needs <= num_pages]
    for follower in ready:
        unfollow(state, follower)
        state.waiting.add(follower)


def abandon(state: SchedulerState, leader: Sequence) -> None:
    """The row was left: all its followers wait in the queue again."""
    _resign(state, leader)
    for follower in list(leader.followers or ()):
        unfollow(state, follower)
        state.waiting.add(follower)


def unfollow(state: SchedulerState, follower: Sequence) -> None:
    assert follower.leader is not None
    assert follower.leader.followers is not None
    del follower.leader.followers[follower]
    follower.leader = None
    state.num_followers -= 1


def _resign(state: SchedulerState, row: Sequence) -> None:
    if row.next_key is not None and state.leaders.get(row.next_key) is row:
        del state.leaders[row.next_key]
    row.next_key = None
