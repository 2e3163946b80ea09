"""Rate limits of clients, and the memory of owned ids; the clock is an argument."""

from __future__ import annotations

import time

import pytest

from aserve.http.errors import RequestFailed
from aserve.router.owners import Owners
from aserve.router.rate_limits import RateLimits, SocketLimits


def is_admitted(rates: RateLimits, client: str, num_tokens: int, now_s: float) -> bool:
    try:
        rates.admit(client, num_tokens, now_s)
    except RequestFailed:
        return False
    return True


def test_a_client_gets_its_requests_per_minute_and_no_other_pays() -> None:
    rates = RateLimits({"requests": 60})
    assert sum(is_admitted(rates, "a", 1, 0.0) for _ in range(100)) == 60
    assert is_admitted(rates, "b", 1, 0.0)
    assert not is_admitted(rates, "a", 1, 0.9)
    assert is_admitted(rates, "a", 1, 1.95)
    assert sum(is_admitted(rates, "a", 1, 31.95) for _ in range(100)) == 30


def test_tokens_are_charged_in_advance_and_corrected_by_the_usage() -> None:
    rates = RateLimits({"tokens": 600})
    assert is_admitted(rates, "a", 600, 0.0)
    assert not is_admitted(rates, "a", 100, 0.0)
    rates.correct("a", charged=600, used=100)
    assert is_admitted(rates, "a", 500, 0.0)
    rates.correct("a", charged=500, used=800)
    with pytest.raises(RequestFailed) as refused:
        rates.admit("a", 100, 0.0)
    assert refused.value.info.retry_after_s == pytest.approx((100 + 300) / 10)
    assert is_admitted(rates, "a", 5000, 1e6), "more than the limit waits for a full bucket"
    assert is_admitted(rates, "a", 600, 1e6 + 60), "and empties it, but no more"


CREATE = '{"type":"response.create","input":"abcd","max_output_tokens":200}'


@pytest.mark.parametrize(
    ("answer", "used"),
    [
        ('{"type":"response.completed","usage":{"total_tokens":30}}', 60),
        ('{"type":"response.incomplete","usage": {"total_tokens": 30}}', 60),
        ('{"type":"error","error":{}}', 201),
        ('{"type":"response.completed"}', 201),
        (
            '{"type":"response.x","delta":"\\"type\\":\\"response.failed\\",\\"total_tokens\\":1"}',
            201,
        ),
    ],
)
def test_each_answer_in_a_websocket_costs_its_usage(answer: str, used: int) -> None:
    """The second one is that of a request before, which is read again."""
    rates = RateLimits({"tokens": 600})
    limits = SocketLimits(rates, "a", lambda: None)
    assert limits.asked(CREATE) is None
    limits.answered(answer)
    limits.answered(answer)
    left = int(rates.headers("a", time.monotonic())["x-ratelimit-remaining-tokens"])
    assert left == pytest.approx(600 - used, abs=2)


def test_the_headers_are_those_of_openai() -> None:
    rates = RateLimits({"requests": 60, "tokens": 6000})
    rates.admit("a", 100, 5.0)
    assert rates.headers("a", 5.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5900",
        "x-ratelimit-reset-tokens": "1.000s",
    }


def test_owners_are_bounded_and_the_first_maker_of_an_id_keeps_it() -> None:
    owners = Owners(max_ids=3)
    owners.learn(["x", "y"], "a")
    owners.learn(["x", "z"], "b")
    assert [owners.find([each]) for each in "xyz"] == ["a", "a", "b"]
    owners.learn(["w"], "b")
    assert owners.find(["y"]) == ""
    assert owners.find(["unknown", "x"]) == "a"
    owners.forget("b")
    assert (len(owners), owners.find(["z"])) == (1, "")
