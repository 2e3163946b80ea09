"""`aserve bench one-batch`: what is prefill and what decode, and the share of the limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aserve.bench.limits import MachineLimits, read_limits
from aserve.bench.one_batch import summarize
from aserve.bench.roofline import Parameters, Roofline, count_parameters
from aserve.bench.step_driver import StepTime
from aserve.cli import main
from aserve.errors import ConfigError
from aserve.messages.step import StepStats
from aserve.tiny import MODEL_DIR
from tests.bench.last_line import Captured, figures_of

RATES = {"read_weights_2thr_GBps": {"median": 30.0}, "read_1thr_GBps": 16, "matmul_GFLOPs": 300.0}


@pytest.fixture
def limits(tmp_path: Path) -> Path:
    path = tmp_path / "limits.json"
    path.write_text(json.dumps(RATES))
    return path


def step(launched_s: float, done_s: float, *, prefill: int = 0, cached: int = 0) -> StepTime:
    stats = StepStats(num_prefill_tokens=prefill, num_cached_tokens=cached)
    return StepTime(stats, launched_s, done_s)


def test_the_prefill_ends_with_the_last_chunk_and_a_step_is_what_comes_after() -> None:
    found = summarize(
        [step(1.0, 1.5, prefill=64), step(1.1, 2.0, prefill=36, cached=3), step(1.6, 2.25),
         step(2.1, 2.5)]
    )  # fmt: skip
    assert (found.prefill_s, found.decode_s, found.num_steps) == (1.0, 0.5, 2)
    assert found.num_cached == 3


@pytest.mark.slow
def test_each_batch_has_a_line_and_nothing_comes_from_a_cache(
    capsys: Captured, limits: Path
) -> None:
    figures = figures_of(
        capsys,
        *("one-batch", "--batch-sizes", "1,3", "--input-lens", "20,33", "--output-len", "4"),
        *("--repeats", "1", "--limits", str(limits)),
    )
    lines = figures["batches"]
    shapes = [(line["rows"], line["input_len"]) for line in lines]
    assert shapes == [(1, 20), (1, 33), (3, 20), (3, 33)]
    assert all(line["decode_tok_s"] > 0 for line in lines)
    assert figures["cached_tokens"] == 0
    assert figures["limits"]["limits"] == {"read_gb_per_s": 30.0, "matmul_gflops": 300.0}


def test_an_error_of_the_engine_is_one_line(capsys: Captured, limits: Path) -> None:
    sizes = ("--batch-sizes", "1", "--input-lens", "2000", "--limits", str(limits))
    assert main(["bench", "one-batch", *sizes]) == 2
    assert "2000" in capsys.readouterr().err


def test_a_steps_time_is_compared_with_the_bytes_of_its_weights() -> None:
    rates = MachineLimits(read_gb_per_s=10.0, matmul_gflops=100.0)
    roofline = Roofline(Parameters(body=900_000_000, head=100_000_000), 16, rates)
    assert roofline.read_share(0.4) == pytest.approx(0.5)  # 2 GB at 10 GB/s are 0.2 s
    operations = 2 * (900e6 * 100 + 100e6 * 2)
    share = roofline.matmul_share(100, 10.0, num_rows=2)
    assert share == pytest.approx(operations / 10 / 100e9)


@pytest.mark.slow
def test_a_tied_head_is_counted_and_the_table_of_inputs_is_not() -> None:
    counted = count_parameters(MODEL_DIR)
    layer = 128 * (256 + 128 + 128 + 256) + 3 * 128 * 384 + 2 * 128
    assert counted == Parameters(body=6 * layer + 128, head=2048 * 128)


def test_a_file_without_rates_is_refused(limits: Path) -> None:
    assert read_limits(limits) == MachineLimits(30.0, 300.0)
    limits.write_text('{"read_GBps": 3}')
    with pytest.raises(ConfigError, match="--limits"):
        read_limits(limits)
