"""Workers of a team meet: what one wrote before, all read afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from numba import prange, types

from aserve_kernels.cpu.callback import compile_callback
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.memory import INT64_LIKE, array_at
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead
from aserve_kernels.cpu.team import (
    Team,
    meet,
    new_meeting,
    run_shares,
    share_of,
    team_size,
)

COLUMN = types.Array(types.int64, 1, "C")
NUM_PHASES = 2_000


@cached_njit(parallel=True, nogil=True)
def count_phases(
    phases: Int64s, late: Int64s, meeting: Int64s, num_phases: int, num_workers: int
) -> None:
    """Each worker counts its phases, and how often it saw another in an earlier one."""
    for worker in prange(num_workers):
        team = Team(worker, num_workers, meeting)
        for phase in range(num_phases):
            phases[8 * worker] += 1
            meet(team)
            for other in range(num_workers):
                late[8 * worker] += phases[8 * other] <= phase
            meet(team)


def test_no_worker_goes_on_before_all_have_come() -> None:
    num_workers = team_size(4)
    compile_ahead(count_phases, COLUMN, COLUMN, COLUMN, types.int64, types.int64)
    phases, late = np.zeros(8 * num_workers, np.int64), np.zeros(8 * num_workers, np.int64)
    for _ in range(2):  # a meeting is as new afterwards
        count_phases(phases, late, meeting := new_meeting(), NUM_PHASES, num_workers)
        count_phases(phases, late, meeting, NUM_PHASES, num_workers)
    assert (phases[::8] == 4 * NUM_PHASES).all()
    assert not late[::8].any()


@pytest.mark.parametrize("num_units", [0, 1, 2, 7, 64])
def test_shares_cover_all_units_once(num_units: int) -> None:
    for num_workers in (1, 2, 3, 8):
        teams = [Team(worker, num_workers, new_meeting()) for worker in range(num_workers)]
        bounds = [share_of(num_units, team) for team in teams]
        units = [unit for first, last in bounds for unit in range(first, last)]
        assert units == list(range(num_units))


def test_each_worker_of_a_team_is_called_once() -> None:
    def note_call(address: int, worker: int, num_workers: int) -> None:
        array_at(address, (num_workers,), INT64_LIKE)[worker] += num_workers

    function = compile_callback(note_call, 3)
    for num_workers in {1, team_size(2), team_size(4)}:
        sizes = np.zeros(num_workers, np.int64)
        run_shares(function.address, sizes.ctypes.data, num_workers)
        assert sizes.tolist() == [num_workers] * num_workers


def test_a_team_has_no_more_workers_than_there_are_threads() -> None:
    assert team_size(1) == 1
    assert team_size(10_000) < 10_000
