"""What the benches make of the times that they measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aserve.bench import overlap_sim
from aserve.bench.batch_times import BatchTimes, Scenario
from aserve.bench.limits import MachineLimits, read_limits
from aserve.bench.one_batch import summarize
from aserve.bench.roofline import Parameters, Roofline, count_parameters
from aserve.bench.serving_figures import read_goodput, serving_figures
from aserve.bench.sleeping_engine import Nap
from aserve.bench.step_driver import StepTime
from aserve.bench.streamed import Answer
from aserve.errors import BugError, ConfigError
from aserve.messages.step import StepStats
from aserve.tiny import MODEL_DIR
from tests.bench.last_line import Captured, figures_of

RATES = {"read_weights_2thr_GBps": {"median": 30.0}, "read_1thr_GBps": 16, "matmul_GFLOPs": 300.0}


def step(launched_s: float, done_s: float, *, prefill: int = 0, cached: int = 0) -> StepTime:
    stats = StepStats(num_prefill_tokens=prefill, num_cached_tokens=cached)
    return StepTime(stats, launched_s, done_s)


def test_the_prefill_ends_with_the_last_chunk_and_a_step_is_what_comes_after() -> None:
    prefills = [step(1.0, 1.5, prefill=64), step(1.1, 2.0, prefill=36, cached=3)]
    found = summarize([*prefills, step(1.6, 2.25), step(2.1, 2.5)])
    assert (found.prefill_s, found.decode_s, found.num_steps) == (1.0, 0.5, 2)
    assert found.num_cached == 3


@pytest.mark.slow
def test_each_batch_has_a_line_and_nothing_comes_from_a_cache(
    capsys: Captured, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps(RATES))
    sizes = ("--batch-sizes", "1,3", "--input-lens", "20,33", "--output-len", "4")
    figures = figures_of(capsys, "one-batch", *sizes, "--repeats", "1", "--limits", str(limits))
    lines = figures["batches"]
    shapes = [(line["rows"], line["input_len"]) for line in lines]
    assert shapes == [(1, 20), (1, 33), (3, 20), (3, 33)]
    assert all(line["decode_tok_s"] > 0 for line in lines)
    assert figures["cached_tokens"] == 0
    assert figures["limits"]["limits"] == {"read_gb_per_s": 30.0, "matmul_gflops": 300.0}
    limits.write_text('{"read_GBps": 3}')
    with pytest.raises(ConfigError, match="--limits"):
        read_limits(limits)


def test_a_steps_time_is_compared_with_the_bytes_of_its_weights() -> None:
    rates = MachineLimits(read_gb_per_s=10.0, matmul_gflops=100.0)
    roofline = Roofline(Parameters(body=900_000_000, head=100_000_000), 16, rates)
    assert roofline.read_share(0.4) == pytest.approx(0.5)  # 2 GB at 10 GB/s are 0.2 s
    operations = 2 * (900e6 * 100 + 100e6 * 2)
    share = roofline.matmul_share(100, 10.0, num_rows=2)
    assert share == pytest.approx(operations / 10 / 100e9)


@pytest.mark.slow
def test_a_tied_head_is_counted_and_the_table_of_inputs_is_not() -> None:
    layer = 128 * (256 + 128 + 128 + 256) + 3 * 128 * 384 + 2 * 128
    assert count_parameters(MODEL_DIR) == Parameters(body=6 * layer + 128, head=2048 * 128)


def test_busy_is_the_time_asleep_from_the_first_start_to_the_last_wake() -> None:
    found = overlap_sim.summarize([Nap(1, 10.0, 10.2), Nap(1, 10.3, 10.5), Nap(1, 10.5, 11.0)])
    assert found.busy == pytest.approx(0.9)
    assert found.gap_us == pytest.approx(0.05e6)
    assert found.num_steps == 3


async def test_rates_follow_from_t1_and_tn() -> None:
    times = BatchTimes(Scenario("b4", num_prompts=4, input_len=100, output_len=11))
    times.seconds = {1: [0.4, 0.5, 0.6], 11: [1.4, 1.5, 1.7]}
    times.foreign = [0.0, 0.25]
    assert times.figures() == {
        "ttft_ms": 500.0,
        "prefill_tok_s": 800.0,
        "decode_ms_per_step": 100.0,
        "decode_tok_s": 40.0,
        "out_tok_s": 29.333,
        "spread": 0.2,
        "foreign_cpu": 0.25,
    }


async def test_an_engine_with_too_few_tokens_is_an_error() -> None:
    async def lazy(prompts: object, num_new: int) -> int:
        return num_new - 1

    times = BatchTimes(Scenario("b1", num_prompts=1, input_len=2, output_len=3))
    with pytest.raises(BugError, match="got 2 tokens instead of 1 x 3"):
        await times.add(lazy, [[1, 2]], 3)


FAST = Answer(ttft_s=0.1, e2el_s=0.5, itls_s=[0.1] * 4, prompt_tokens=7, completion_tokens=5)
SLOW = Answer(ttft_s=0.3, e2el_s=2.3, itls_s=[0.5] * 4, prompt_tokens=9, completion_tokens=5)
ONE_TOKEN = Answer(ttft_s=0.2, e2el_s=0.2, prompt_tokens=4, completion_tokens=1)
FAILED = Answer(error="503: draining")


def load_figures(*answers: Answer, goodput: str | None = None) -> dict[str, float]:
    return serving_figures(answers, duration_s=2.0, limits_ms=read_goodput(goodput))


def test_figures_are_of_whole_answers_and_tpot_leaves_the_first_token_out() -> None:
    found = load_figures(FAST, SLOW, FAILED)
    expected = {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 16,
        "total_output_tokens": 10,
        "request_throughput": 1.0,
        "output_throughput": 5.0,
        "total_token_throughput": 13.0,
        "mean_ttft_ms": 200,
        "p99_ttft_ms": 300,
        "mean_tpot_ms": (100 + 500) / 2,
        "median_itl_ms": (100 + 500) / 2,
        "p99_e2el_ms": 2300,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert load_figures(FAST, ONE_TOKEN)["mean_tpot_ms"] == pytest.approx(100)


def test_goodput_counts_answers_that_keep_every_limit() -> None:
    assert load_figures(FAST, SLOW, FAILED, goodput="ttft:150")["request_goodput"] == 0.5
    assert load_figures(FAST, SLOW, goodput="ttft:1000,tpot:200")["request_goodput"] == 0.5
    assert load_figures(FAST, SLOW, goodput="ttft:1000 tpot:600")["request_goodput"] == 1.0
    assert "request_goodput" not in load_figures(FAST)


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:x", "ttft:5;tpot:4"])
def test_an_invalid_goodput_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        read_goodput(text)
