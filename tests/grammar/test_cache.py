"""What is kept of compiled grammars, within bytes, and of failures, within time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from aserve.errors import InvalidRequest
from aserve.grammar.cache import FAILURE_S, MAX_FAILURES, GrammarCache
from aserve.messages.requests import Grammar


@dataclass
class Compiled:
    memory_size_bytes: int


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def regex(source: str) -> Grammar:
    return Grammar("regex", source)


@pytest.fixture
def cache() -> GrammarCache[Compiled]:
    return GrammarCache(100, clock=Clock())


def test_the_least_recently_used_grammars_leave_when_the_budget_is_spent(
    cache: GrammarCache[Compiled],
) -> None:
    for name in "abc":
        cache.keep(regex(name), Compiled(30))
    assert cache.get(regex("a")) is not None
    cache.keep(regex("d"), Compiled(50))
    assert [name for name in "abcd" if cache.get(regex(name))] == ["a", "d"]
    assert cache.size_bytes == 80
    cache.keep(regex("larger"), Compiled(101))
    assert cache.get(regex("larger")) is None
    assert cache.size_bytes == 0


def test_a_failure_is_remembered_for_a_while() -> None:
    clock = Clock()
    cache: GrammarCache[Compiled] = GrammarCache(100, clock=clock)
    error = InvalidRequest("no")
    cache.keep_failure(regex("("), error)
    clock.now_s = FAILURE_S - 1
    assert cache.get(regex("(")) is error
    clock.now_s = FAILURE_S
    assert cache.get(regex("(")) is None


def test_the_oldest_of_too_many_failures_is_forgotten(cache: GrammarCache[Compiled]) -> None:
    for number in range(MAX_FAILURES + 1):
        cache.keep_failure(regex(str(number)), InvalidRequest("no"))
    assert cache.get(regex("0")) is None
    assert cache.get(regex("1")) is not None


def test_a_failure_names_the_field_of_whoever_asked(cache: GrammarCache[Compiled]) -> None:
    cache.keep_failure(Grammar("json_schema", "{", "response_format"), InvalidRequest("no"))
    assert cache.get(Grammar("json_schema", "{", "structured_outputs.json")) is None
