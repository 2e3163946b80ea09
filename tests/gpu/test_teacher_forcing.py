"""Differences that rounding may explain, and those that it cannot."""

from __future__ import annotations

import math

import pytest
import torch

from aserve.gpu.teacher_forcing import Outcome, Scores

NO_FILTER = (0, 1.0, 0.0)
# Probabilities of the tokens 0 to 3; in the cases token 0 is drawn, and another one expected.
PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)


def scores(noise: list[float], *, temperature: float, limits: tuple[int, float, float]) -> Scores:
    logits = PROBS.log() * (temperature or 1.0)
    noisy = logits + torch.tensor(noise, dtype=torch.float64) * temperature
    return Scores(logits, noisy, temperature, limits)


NEAR = 0.999 * math.log(2)  # noise with which token 1 nearly draws level with token 0
CASES: dict[str, tuple[list[float], float, tuple[int, float, float], int, float, bool]] = {
    # the noise, temperature, filters, expected token, tolerance; whether rounding explains it
    "greedy, far": ([0, 0, 0, 0], 0.0, NO_FILTER, 1, 0.1, False),
    "greedy, near": ([0, 0, 0, 0], 0.0, NO_FILTER, 1, 0.35, True),
    "drawn, far": ([0, 0, 0, 0], 1.0, NO_FILTER, 1, 0.1, False),
    "drawn, near": ([0, NEAR, 0, 0], 1.0, NO_FILTER, 1, 0.001, True),
    "exact": ([0, NEAR, 0, 0], 1.0, NO_FILTER, 1, 0.0, False),
    "near, but a third is above both": ([0, NEAR, 9, 0], 1.0, NO_FILTER, 1, 0.001, False),
    "the third is filtered": ([0, NEAR, 0, 9], 1.0, (3, 1.0, 0.0), 1, 0.001, True),
    "top_k far from it": ([0, 0, 0, 9], 1.0, (2, 1.0, 0.0), 3, 0.01, False),
    "top_k at its edge": ([0, 0, 9, 0], 1.0, (2, 1.0, 0.0), 2, 0.3, True),
    "top_p far from it": ([0, 0, 0, 9], 1.0, (0, 0.7, 0.0), 3, 0.001, False),
    "top_p at its edge": ([0, 0, 9, 0], 1.0, (0, 0.7495, 0.0), 2, 0.001, True),
    "min_p far from it": ([0, 0, 0, 9], 1.0, (0, 1.0, 0.4), 3, 0.001, False),
    "min_p at its edge": ([0, 0, 0, 9], 1.0, (0, 1.0, 0.2001), 3, 0.001, True),
    "a cold draw": ([0, NEAR, 0, 0], 0.01, NO_FILTER, 1, 0.001, True),
}


@pytest.mark.parametrize("name", CASES)
def test_rounding_explains_only_what_is_within_the_tolerance(name: str) -> None:
    noise, temperature, limits, expected, tolerance, is_rounding = CASES[name]
    found = scores(noise, temperature=temperature, limits=limits)
    assert found.is_rounding(expected, tolerance) is is_rounding


def test_a_token_that_cannot_be_drawn_is_no_rounding() -> None:
    logits = PROBS.log()
    logits[1] = -torch.inf
    found = Scores(logits, logits, 0.0, NO_FILTER)
    assert not found.is_rounding(1, 1e9)
    assert found.gap(1, 0) == math.inf


def test_likely_tokens_are_told_from_unlikely_ones() -> None:
    likely, unlikely = Outcome(), Outcome()
    likely.variance = unlikely.variance = 16.0
    likely.surprise, unlikely.surprise = 15.0, 17.0
    assert likely.is_plausible
    assert not unlikely.is_plausible
