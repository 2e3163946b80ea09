"""Threads that run one kernel together, each its share of every phase, and meet between phases.

WHY: a parallel region for each product of a layer wakes and joins all threads for tens of
microseconds of work. A team enters one region per step, and a meeting takes less than one.

`run_team` and some kernels start a team by `prange(num_workers)`. Of at most as many iterations as
it has threads, numba's OpenMP layer and its own work queue give each to a thread of its own. TBB
may not, so it must not be chosen before them. Whatever a worker wrote before a meeting, all read
after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import get_num_threads, njit, prange, types
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.callback import call_at
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.simd import INDEX, Intrinsic

# The words of a meeting: how many have come, and how many meetings there were. Each has a cache
# line of its own, since those that wait read the second while others add to the first.
LINE = 8
MEETING_LEN = 2 * LINE
NUM_COME, NUM_MEETINGS = 0, LINE
SPINS = 1 << 14  # about 0.2 ms; then a worker gives its processor to others, if there are any


def team_size(num_threads: int) -> int:
    """Returns how many workers a team of so many threads can have."""
    return min(num_threads, get_num_threads())


class Team(NamedTuple):
    """One worker's view of its team."""

    worker: int
    num_workers: int
    meeting: Int64s  # [MEETING_LEN], zeros before the first meeting


def new_meeting() -> Int64s:
    return np.zeros(MEETING_LEN, np.int64)


@njit(parallel=True, nogil=True)
def run_team(function: int, call: int, num_workers: int) -> None:
    """Calls the function of C at an address with (address of its arguments, worker, number of
    workers), by each worker of a team."""
    for index in prange(num_workers):
        call_at(function, (call, worker_of(index), num_workers))


@njit(nogil=True)
def run_shares(function: int, call: int, num_workers: int) -> None:
    """Does the same, without other threads for a team of one."""
    if num_workers == 1:
        call_at(function, (call, 0, 1))
    else:
        run_team(function, call, num_workers)


@njit(inline="always")
def worker_of(index: int) -> int:
    """Returns the worker of an iteration of prange. WHY: numba counts them in uint64, but infers
    types with int64, and would compile what gets the number for both.
    """
    return int(np.int64(index))


@njit(nogil=True)
def share_of(num_units: int, team: Team) -> tuple[int, int]:
    """Returns the first unit of a worker's share, and the one after its last."""
    first = num_units * team.worker // team.num_workers
    return first, num_units * (team.worker + 1) // team.num_workers


@njit(nogil=True)
def meet(team: Team) -> None:
    """Waits until all workers have come here."""
    if team.num_workers == 1:
        return
    number = read_shared(team.meeting, NUM_MEETINGS)
    if add_shared(team.meeting, NUM_COME, 1) == team.num_workers - 1:
        add_shared(team.meeting, NUM_COME, -team.num_workers)
        add_shared(team.meeting, NUM_MEETINGS, 1)
        return
    num_spins = 0
    while read_shared(team.meeting, NUM_MEETINGS) == number:
        num_spins += 1
        if num_spins > SPINS:
            YIELD()


YIELD = types.ExternalFunction("sched_yield", types.int32())


def add_shared(words: Int64s, index: int, value: int) -> int:
    """Adds to a word that other threads change, and returns what it was."""
    before = int(words[index])
    words[index] += value
    return before


def read_shared(words: Int64s, index: int) -> int:
    """Returns a word that other threads change."""
    return int(words[index])


@intrinsic
def _add_shared(typing: Any, words: Any, index: Any, value: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(words)(context, builder, args[0]).data
        word = builder.gep(data, [args[1]])
        return builder.atomic_rmw("add", word, args[2], "seq_cst")

    return types.int64(words, types.int64, types.int64), emit


@intrinsic
def _read_shared(typing: Any, words: Any, index: Any) -> Intrinsic:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(words)(context, builder, args[0]).data
        pause = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.x86.sse2.pause"
        if name not in builder.module.globals:
            ir.Function(builder.module, pause, name)
        builder.call(builder.module.globals[name], [])
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", INDEX.width // 8)

    return types.int64(words, types.int64), emit


@overload(add_shared, strict=False)
def _overload_add_shared(words: Any, index: Any, value: Any) -> Callable[..., int]:
    return lambda words, index, value: _add_shared(words, index, value)


@overload(read_shared, strict=False)
def _overload_read_shared(words: Any, index: Any) -> Callable[..., int]:
    return lambda words, index: _read_shared(words, index)
