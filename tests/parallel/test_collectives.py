"""Collectives over shared memory, each rank a thread: the bits of gloo, and the loss of a rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from aserve.gpu.parallel.collectives import Collectives, GroupCollectives
from aserve.gpu.parallel.rank_locks import RankLocks
from aserve.gpu.parallel.shared import BUFFER_BYTES, SharedCollectives
from aserve.parallel.topology import Coordinates, Patience, RankLost

T = TypeVar("T")

NUM_RANKS = 3
LONG = BUFFER_BYTES // 4 + 3  # travels in two pieces
SHAPES = [(1, 8), (5, 7), (0, 4), (2, LONG), (3,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def on_ranks(run: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(run, range(NUM_RANKS)))


def connected(
    make: Callable[[Coordinates, Patience], Collectives], store: Path, patience: Patience
) -> list[Collectives]:
    return on_ranks(lambda rank: make(Coordinates(rank, NUM_RANKS, store=str(store)), patience))


def results(ranks: list[Collectives]) -> list[list[Tensor]]:
    """What each rank gets, through all shapes and dtypes and with more turns than buffers."""

    def run(rank: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(rank)
        group, found = ranks[rank], []
        for dtype in DTYPES:
            for shape in SHAPES:
                x = torch.randn(shape, generator=draw).to(dtype)
                found += [group.concat(x), group.sum(x.clone())]
        return [*found, torch.tensor(group.least(10 - rank))]

    return on_ranks(run)


def test_sums_have_the_bits_of_gloo_on_all_ranks(tmp_path: Path) -> None:
    gloo = results(connected(GroupCollectives, tmp_path / "gloo", Patience()))
    shared = results(connected(SharedCollectives, tmp_path / "shared", Patience()))
    for expected, *found in zip(gloo[0], *shared, strict=True):
        assert all(torch.equal(expected, each) for each in found)


@pytest.mark.parametrize("make", [GroupCollectives, SharedCollectives])
def test_the_time_in_which_ranks_must_meet_is_that_of_their_place(
    make: Callable[[Coordinates, Patience], Collectives], tmp_path: Path
) -> None:
    """It was a minute, however long one machine of a cluster imports its libraries."""
    with pytest.raises(RankLost):
        make(Coordinates(0, 2, store=str(tmp_path / "store"), meet_s=0.2), Patience())


def test_a_rank_that_has_ended_is_lost_at_once_and_one_that_stays_away_in_time(
    tmp_path: Path,
) -> None:
    patience = Patience()
    ranks = connected(SharedCollectives, tmp_path / "store", patience)
    patience.seconds = 0.1
    with pytest.raises(RankLost, match="lost rank 1, which did not come to a collective in 0"):
        ranks[0].least(1)
    patience.seconds = 600.0
    del ranks[1]
    with pytest.raises(RankLost, match="lost rank 1, which has ended"):
        ranks[0].least(1)


def test_the_locks_of_a_rank_are_closed_with_their_object(tmp_path: Path) -> None:
    """Files that nobody closes are warnings of Python, in whatever test runs later."""
    locks = RankLocks(Coordinates(0, 1, store=str(tmp_path / "store")))
    file = locks._files[0]
    assert not file.closed
    del locks
    assert file.closed
