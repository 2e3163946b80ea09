"""What masks may take: each its allowance, and a request or a client so much more in all."""

from __future__ import annotations

import pytest

from aserve.errors import InvalidRequest, QueueFull
from aserve.grammar import mask_budget
from aserve.grammar.mask_budget import ALLOWANCE_S, SLOW_S, MaskBudget, MaskLimits, RequestEffort


class Bench:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.budget = MaskBudget(MaskLimits(2.0, 10.0), clock=lambda: self.now_s)

    def effort(self, client: str = "a", *, is_slow: bool = False) -> RequestEffort:
        return RequestEffort(client=client, param="structured_outputs.regex", is_slow=is_slow)

    def spend(self, client: str, excess_s: float) -> None:
        """By as many requests as it takes, each within its limit."""
        for _ in range(round(excess_s)):
            self.budget.charge(self.effort(client), 1.0 + ALLOWANCE_S)


def test_masks_within_their_allowance_cost_nothing_however_many_they_are() -> None:
    bench, effort = Bench(), Bench().effort()
    for _ in range(100_000):
        bench.budget.charge(effort, ALLOWANCE_S)
    bench.budget.check_client(effort)
    assert effort.excess_s == 0
    assert not effort.is_slow


def test_a_request_over_its_limit_is_told_the_values_and_what_to_do() -> None:
    bench, effort = Bench(), Bench().effort()
    for _ in range(3):
        bench.budget.charge(effort, 0.502)
    with pytest.raises(InvalidRequest) as caught:
        bench.budget.charge(effort, 0.6)
    error = caught.value.info()
    assert (error.status, error.code) == (400, "grammar_too_complex")
    assert error.param == "structured_outputs.regex"
    for words in ("2.1 seconds", "4 tokens", "limit is 2 s", "--grammar-mask-time"):
        assert words in error.message


def test_a_mask_that_is_not_ready_counts_as_far_as_it_is() -> None:
    bench, effort = Bench(), Bench().effort()
    bench.budget.charge(effort, 1.5)
    assert not bench.budget.is_over(effort, 0.4)
    assert bench.budget.is_over(effort, 0.6)


def test_a_request_is_slow_after_some_excess_or_from_its_trial_on() -> None:
    bench, effort = Bench(), Bench().effort()
    bench.budget.charge(effort, SLOW_S)
    assert not effort.is_slow
    bench.budget.charge(effort, 2 * ALLOWANCE_S)
    assert effort.is_slow
    assert Bench().effort(is_slow=True).is_slow


def test_a_client_over_its_limit_gets_no_slow_masks_until_its_time_has_come_back() -> None:
    bench = Bench()
    bench.spend("a", 11)
    with pytest.raises(QueueFull, match="--grammar-client-mask-time") as caught:
        bench.budget.check_client(bench.effort("a", is_slow=True))
    assert caught.value.error_code == "grammar_time_exhausted"
    assert caught.value.retry_after_s == 6
    bench.budget.check_client(bench.effort("a"))  # ordinary grammars go on
    bench.budget.check_client(bench.effort("b", is_slow=True))
    bench.now_s += 7
    bench.budget.check_client(bench.effort("a", is_slow=True))


def test_accounts_are_bounded_and_the_least_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_budget, "MAX_CLIENTS", 3)
    bench = Bench()
    for client, excess_s in (("heavy", 11), ("light", 1), ("middle", 5), ("new", 2), ("newer", 2)):
        bench.spend(client, excess_s)
        assert len(bench.budget._clients) <= 3
    with pytest.raises(QueueFull):
        bench.budget.check_client(bench.effort("heavy", is_slow=True))
