"""`aserve bench offline`: counts that must hold, and the rates that follow from T1 and Tn."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aserve.bench.batch_times import BatchTimes, Scenario
from aserve.cli import main
from aserve.errors import BugError
from aserve.tiny import MODEL_DIR
from tests.bench.last_line import Captured, figures_of

LOAD = ("offline", "--num-prompts", "3", "--input-len", "20", "--output-len", "4")


def test_a_load_counts_requests_times_tokens_and_nothing_comes_from_the_cache(
    capsys: Captured,
) -> None:
    figures = figures_of(capsys, *LOAD, "--repeats", "2", "--max-concurrency", "2")
    for one in figures["runs"]:
        assert (one["completed"], one["failed"]) == (3, 0)
        assert one["total_output_tokens"] == 3 * 4
        assert one["total_input_tokens"] == 3 * 20
    assert figures["cached_tokens"] == 0
    assert figures["output_throughput"] > 0
    assert "float32" in figures["engine"]


def test_requests_may_begin_at_a_rate(capsys: Captured) -> None:
    figures = figures_of(capsys, *LOAD, "--repeats", "1", "--request-rate", "1000")
    assert figures["completed"] == 3


@pytest.mark.slow
def test_a_comparison_with_transformers_shows_both_engines_and_their_ratio(
    capsys: Captured,
) -> None:
    beside = ("--beside", "transformers", "--beside-dtype", "float32", "--repeats", "1")
    figures = figures_of(capsys, *LOAD, *beside)
    by_engine = figures["scenarios"]["batch"]
    assert list(by_engine) == ["aserve", "transformers"]
    for rate, ratio in figures["ratios"]["batch"].items():
        wanted = by_engine["aserve"][rate] / by_engine["transformers"][rate]
        assert ratio == pytest.approx(wanted, abs=2e-3)
    assert figures["cached_tokens"] == 0


def test_a_model_without_a_checkpoint_gets_random_weights(capsys: Captured, tmp_path: Path) -> None:
    shutil.copy(MODEL_DIR / "config.json", tmp_path)
    dummy = ("--model", str(tmp_path), "--load-format", "dummy", "--num-pages", "64")
    assert figures_of(capsys, *LOAD, *dummy, "--repeats", "1")["completed"] == 3


def test_the_error_of_an_unknown_scenario_lists_the_known_ones(capsys: Captured) -> None:
    assert main(["bench", "offline", "--preset", "peers", "--scenario", "b2"]) == 2
    assert "--scenario b2: must be among b1, b8, b32, prefill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "peers"], "prefill needs 2049 tokens, but the model's context has 1024"),
        (["--input-len", "1020", "--output-len", "5"], "1025 tokens"),
        (["--num-pages", "4", "--input-len", "100"], "pages"),
    ],
)
def test_options_that_do_not_fit_the_model_are_one_line(
    arguments: list[str], words: str, capsys: Captured
) -> None:
    assert main(["bench", "offline", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


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
