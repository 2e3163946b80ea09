"""How often tokens are drawn: as often as they are probable, the rare ones included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from aserve.gpu.sampling.draw import add_noise
from aserve.gpu.sampling.gumbel import gumbel_noise
from tests.gpu.batch_builder import greedy
from tests.gpu.frequencies import assert_frequencies, naive_probs
from tests.gpu.naive_sampler import naive_noise
from tests.gpu.sampler_run import DrawAt, run_sampler

NUM_DRAWS = 20_000
LOGITS = torch.tensor([2.0, 1.5, 1.5, 1.0, 0.6, 0.2, 0.0, -0.3, -1.0, -2.0, -3.0, -6.0])

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "top-k cuts between equals": {"top_k": 2},
    "top-k of more than there are": {"top_k": 500},
    "min-p": {"min_p": 0.2},
    "top-p of what top-k leaves": {"top_k": 6, "top_p": 0.72},
    "all three": {"top_k": 8, "top_p": 0.9, "min_p": 0.15, "temperature": 1.3},
    "hot, so that the first tries are outside": {"temperature": 50.0, "top_k": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drawn_frequencies_are_the_probabilities_of_the_set(name: str) -> None:
    init = greedy(1, seed=12, **{"temperature": 1.0, **SETTINGS[name]})
    drawn = [DrawAt(1, position) for position in range(NUM_DRAWS)]
    tokens = run_sampler(LOGITS.repeat(NUM_DRAWS, 1), [init], [[0]], drawn).tokens
    counts = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert_frequencies(counts, naive_probs(LOGITS.double().numpy(), init))


def test_a_token_of_probability_one_in_a_million_is_drawn_at_that_rate() -> None:
    """10 of 1e7 draws are expected: in the float32 that rows are served in."""
    scores = torch.tensor([[math.log(1e-6), math.log1p(-1e-6)]])
    size = 500_000
    seeds, temperature = torch.full((size,), 99), torch.ones(1)
    num_rare = 0
    for number in range(20):
        positions = torch.arange(number * size, (number + 1) * size)
        noise = gumbel_noise(seeds, positions, torch.arange(2), torch.float32)
        _, noisy = add_noise(scores, noise, temperature)
        num_rare += int((noisy[:, 0] > noisy[:, 1]).sum())
    assert 2 <= num_rare <= 22  # Poisson of mean 10: outside once in 1,000


def test_noise_is_that_of_its_seed_position_and_token_whatever_the_shape() -> None:
    seeds, positions = [0, -1, 2**63 - 1, -(2**63), 12345], [0, 1, 7, 2**31, 1_000_000]
    noise = gumbel_noise(
        torch.tensor(seeds), torch.tensor(positions), torch.arange(300), torch.float64
    )
    naive = [naive_noise(s, p, 300) for s, p in zip(seeds, positions, strict=True)]
    np.testing.assert_allclose(noise.numpy(), naive, rtol=1e-12)
    some = gumbel_noise(
        torch.tensor(seeds[2:3]), torch.tensor(positions[2:3]), torch.tensor([7]), torch.float64
    )
    assert float(some) == float(noise[2, 7])
