"""Copies of experts and their ranks: against every other choice where there are few."""

from __future__ import annotations

import random
from itertools import product

import pytest

from aserve.gpu.moe.placement import balanced, balancedness, copies_of


@pytest.mark.parametrize("seed", range(5))
def test_no_other_numbers_of_copies_leave_fewer_tokens_per_copy(seed: int) -> None:
    chance = random.Random(seed)
    loads = [chance.randrange(1, 100) for _ in range(4)]
    every = [copies for copies in product(range(1, 5), repeat=4) if sum(copies) == 7]
    best = min(max(n / c for n, c in zip(loads, copies, strict=True)) for copies in every)
    chosen = copies_of(loads, 7)
    assert sum(chosen) == 7
    assert max(n / c for n, c in zip(loads, chosen, strict=True)) == best


@pytest.mark.parametrize("seed", range(10))
def test_every_expert_has_a_slot_and_ranks_get_more_even(seed: int) -> None:
    chance = random.Random(seed)
    loads = [int(chance.paretovariate(1.0) * 10) for _ in range(16)]
    slots = balanced(loads, num_slots=20, num_ranks=4)
    assert sorted(set(slots)) == list(range(16))
    assert [slots.count(expert) for expert in range(16)] == copies_of(loads, 20)
    before = balancedness(loads, [slot % 16 for slot in range(20)], num_ranks=4)
    assert before <= balancedness(loads, slots, num_ranks=4) <= 1.0


def test_a_heavy_expert_is_shared_and_light_ones_stand_beside_it() -> None:
    assert balancedness([6, 2, 2, 2], (0, 1, 2, 3), num_ranks=2) == 0.75
    assert copies_of([6, 2, 2, 2], 6) == [3, 1, 1, 1]
    assert balanced([8, 4, 2, 2], num_slots=4, num_ranks=2) == (0, 3, 1, 2)
    assert balancedness([0, 0], (0, 1), num_ranks=2) == 1.0
