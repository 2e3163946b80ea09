"""Figures of a load, checked on answers whose times are known."""

from __future__ import annotations

import pytest

from aserve.bench.serving_figures import read_goodput, serving_figures
from aserve.bench.streamed import Answer
from aserve.errors import ConfigError

FAST = Answer(ttft_s=0.1, e2el_s=0.5, itls_s=[0.1] * 4, prompt_tokens=7, completion_tokens=5)
SLOW = Answer(ttft_s=0.3, e2el_s=2.3, itls_s=[0.5] * 4, prompt_tokens=9, completion_tokens=5)
ONE_TOKEN = Answer(ttft_s=0.2, e2el_s=0.2, prompt_tokens=4, completion_tokens=1)
FAILED = Answer(error="503: draining")


def figures(*answers: Answer, goodput: str | None = None) -> dict[str, float]:
    return serving_figures(answers, duration_s=2.0, limits_ms=read_goodput(goodput))


def test_counts_and_rates_are_of_the_answers_that_are_whole() -> None:
    found = figures(FAST, SLOW, FAILED)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (16, 10)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 5.0
    assert found["total_token_throughput"] == 13.0


def test_times_are_in_milliseconds_and_tpot_excludes_the_first_token() -> None:
    found = figures(FAST, SLOW)
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["p99_ttft_ms"] == pytest.approx(300)
    assert found["mean_tpot_ms"] == pytest.approx((100 + 500) / 2)
    assert found["median_itl_ms"] == pytest.approx((100 + 500) / 2)
    assert found["p99_e2el_ms"] == pytest.approx(2300)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    assert figures(FAST, ONE_TOKEN)["mean_tpot_ms"] == pytest.approx(100)


def test_goodput_counts_answers_that_keep_every_limit() -> None:
    assert figures(FAST, SLOW, FAILED, goodput="ttft:150")["request_goodput"] == 0.5
    assert figures(FAST, SLOW, goodput="ttft:1000,tpot:200")["request_goodput"] == 0.5
    assert figures(FAST, SLOW, goodput="ttft:1000 tpot:600")["request_goodput"] == 1.0
    assert "request_goodput" not in figures(FAST)


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:x", "ttft:5;tpot:4"])
def test_an_invalid_goodput_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        read_goodput(text)
