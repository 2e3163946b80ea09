"""The sum over ranks inside a compiled step: processes of one machine add up float32 values.

    x = sum_r x_r          in the order of ranks, so that all ranks have the same bits

Each rank copies its part into memory that all of them map, meets the others (rendezvous.py), and
adds what all have written. A team shares the copy and the sum; its first worker meets the other
ranks. There are two buffers, used in turns: whoever comes to a meeting has read what the meeting
before it was about. Longer values travel in pieces.

A rank that waits spins at first, then gives its processor away, then sleeps between looks. Now and
then it looks whether the others still hold their locks. If a rank has ended, or stays away for too
long, LOST is set: no further sum waits, and the caller finds LOST after the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from aserve_kernels.cpu.bf16 import Float32s
from aserve_kernels.cpu.memory import array_at
from aserve_kernels.cpu.rendezvous import FLAGS_PER_LINE, pause, read_flag, write_flag
from aserve_kernels.cpu.team import YIELD, Team, meet, share_of

# The words of a rank: the collectives so far, whether another rank was lost, its place, the
# addresses of flags and buffers, bytes of a buffer, sleeps until a rank counts as lost, and then
# for each rank the descriptor of the file that it has locked (-1 for its own).
NUMBER, LOST, RANK, NUM_RANKS, FLAGS, BUFFERS, BUFFER_BYTES, MAX_SLEEPS, FILES = range(9)

LOOKS = 2_000  # at a flag before the core is given away, about 60 us
YIELDS = 2_000  # before a rank sleeps between looks
SLEEP_US, TIMER_SLACK_US = 200, 60  # a sleep takes about both
SLEEPS_PER_CHECK = 250  # of the others' locks
SHARED_LOCK, DO_NOT_WAIT, UNLOCK = 1, 4, 8  # of flock(2)

SLEEP: Any = types.ExternalFunction("usleep", types.int32(types.int32))
LOCK: Any = types.ExternalFunction("flock", types.int32(types.int32, types.int32))


@njit(nogil=True)
def sum_over_ranks(address: int, x: Float32s, team: Team) -> None:
    """x float32 [n], of which each worker has written a part, becomes the sum. `address` is that of
    the words, or 0 for an engine of one rank. All workers have written when it returns."""
    if address == 0:
        return
    meet(team)
    words = array_at(address, (FILES,), EMPTY)
    num_ranks, rank, size = words[NUM_RANKS], words[RANK], words[BUFFER_BYTES] // 4
    buffers = array_at(words[BUFFERS], (2, num_ranks, size), x)
    for start in range(0, x.shape[0], size):
        piece = x[start : start + size]
        number = words[NUMBER]
        parts = buffers[number & 1]
        first, last = share_of(piece.shape[0], team)
        parts[rank, first:last] = piece[first:last]
        meet(team)
        if team.worker == 0 and words[LOST] == 0:
            words[NUMBER] = number + 1
            words[LOST] = 0 if _meet_ranks(address, number + 1) else 1
        meet(team)
        own = piece[first:last]
        own[:] = parts[0, first:last]
        for other in range(1, num_ranks):
            _add(parts[other, first:last], own)
    meet(team)


EMPTY = np.empty(0, np.int64)


@njit(nogil=True)
def _add(part: Float32s, total: Float32s) -> None:
    for i in range(total.shape[0]):
        total[i] += part[i]


@njit(nogil=True)
def _meet_ranks(address: int, number: int) -> bool:
    """Returns whether all ranks have come to this collective."""
    words = array_at(address, (FILES,), EMPTY)
    num_ranks = words[NUM_RANKS]
    flags: Any = array_at(words[FLAGS], (num_ranks, FLAGS_PER_LINE), EMPTY)
    files = array_at(address + 8 * FILES, (num_ranks,), EMPTY)
    write_flag(flags, words[RANK], number)
    num_sleeps = 0
    for other in range(num_ranks):
        num_looks = 0
        while read_flag(flags, other) < number:
            num_looks += 1
            if num_looks <= LOOKS:
                pause()
            elif num_looks <= LOOKS + YIELDS:
                YIELD()
            else:
                SLEEP(SLEEP_US)
                num_sleeps += 1
                is_checked = num_sleeps % SLEEPS_PER_CHECK == 0
                if num_sleeps > words[MAX_SLEEPS] or (is_checked and _has_ended(files[other])):
                    return False
    return True


@njit(nogil=True)
def _has_ended(file: int) -> bool:
    """Whether the lock on a file is free, which a rank holds as long as it lives."""
    if LOCK(file, SHARED_LOCK | DO_NOT_WAIT) != 0:
        return False
    LOCK(file, UNLOCK)
    return True
