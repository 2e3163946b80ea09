"""What the benches make of the times that they measured."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from aserve.bench.batch_times import BatchTimes, Scenario
from aserve.bench.cpu_time import tree_cpu_s
from aserve.bench.limits import MachineLimits, read_limits
from aserve.bench.load import arrival_times, run_load
from aserve.bench.one_batch import summarize
from aserve.bench.roofline import Parameters, Roofline, count_parameters
from aserve.bench.server_start import resident_bytes
from aserve.bench.serving_figures import read_goodput, serving_figures
from aserve.bench.step_driver import StepTime
from aserve.bench.streamed import Answer
from aserve.errors import BugError, ConfigError
from aserve.gpu.models.load import NativeLoader, make_loader
from aserve.gpu.weights.source import LinearBits
from aserve.messages.step import StepStats
from aserve.tiny import MODEL_DIR
from tests.gpu.weights.checkpoints import write_checkpoint
from tests.gpu.weights.published import FORMATS, SIZES, quantized

RATES = {"read_weights_2thr_GBps": {"median": 30.0}, "read_1thr_GBps": 16, "matmul_GFLOPs": 300.0}


def step(launched_s: float, done_s: float, *, prefill: int = 0, cached: int = 0) -> StepTime:
    stats = StepStats(num_prefill_tokens=prefill, num_cached_tokens=cached)
    return StepTime(stats, launched_s, done_s, num_tokens=1, windows=())


def test_the_prefill_ends_with_the_last_chunk_and_a_step_is_what_comes_after() -> None:
    prefills = [step(1.0, 1.5, prefill=64), step(1.1, 2.0, prefill=36, cached=3)]
    found = summarize([*prefills, step(1.6, 2.25), step(2.1, 2.5)])
    assert (found.prefill_s, found.decode_s, found.num_steps) == (1.0, 0.5, 2)
    assert found.num_cached == 3


def test_limits_of_the_machine_are_read_or_refused(tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps(RATES))
    assert read_limits(limits) == MachineLimits(read_gb_per_s=30.0, matmul_gflops=300.0)
    limits.write_text('{"read_GBps": 3}')
    with pytest.raises(ConfigError, match="--limits"):
        read_limits(limits)


def test_a_steps_time_is_compared_with_the_bytes_of_its_weights() -> None:
    rates = MachineLimits(read_gb_per_s=10.0, matmul_gflops=100.0)
    roofline = Roofline(Parameters(body=900_000_000, head=100_000_000), 2e9, rates)
    assert roofline.read_share(0.4) == pytest.approx(0.5)  # 2 GB at 10 GB/s are 0.2 s
    operations = 2 * (900e6 * 100 + 100e6 * 2)
    share = roofline.matmul_share(100, 10.0, num_rows=2)
    assert share == pytest.approx(operations / 10 / 100e9)


def test_a_step_reads_quantized_layers_as_the_device_keeps_them(tmp_path: Path) -> None:
    """Weights of fp8, AWQ and GGUF checkpoints counted with the bits of the model's dtype."""
    form, (stored, _) = FORMATS["fp8 in blocks"], quantized(FORMATS["fp8 in blocks"])
    write_checkpoint(tmp_path, stored, quantization_config=form.config, **SIZES)
    loader, _ = make_loader(tmp_path)
    assert isinstance(loader, NativeLoader)
    read = {
        name: weight
        for name, weight in stored.items()
        if name != "model.embed_tokens.weight" and "scale" not in name
    }
    kept, dtype = LinearBits(factors=64), torch.float32
    size_bytes = loader.step_bytes(dtype, kept, is_dummy=False)
    assert size_bytes == sum(weight.nbytes for weight in read.values())
    widened_bytes = 4 * sum(weight.numel() for weight in read.values())
    assert loader.step_bytes(dtype, LinearBits(), is_dummy=False) == widened_bytes
    assert loader.step_bytes(dtype, kept, is_dummy=True) == widened_bytes


def test_a_step_reads_the_table_of_a_tied_head_or_the_heads_own_copy() -> None:
    loader, _ = make_loader(MODEL_DIR)
    assert isinstance(loader, NativeLoader)
    num_weights, head = loader.num_weights, 2048 * 128
    norms = num_weights - head - 6 * (128 * (256 + 128 + 128 + 256) + 3 * 128 * 384)
    assert loader.step_bytes(torch.bfloat16, LinearBits(), is_dummy=True) == 2 * num_weights
    in_8_bits = loader.step_bytes(torch.bfloat16, LinearBits(every=8), is_dummy=True)
    assert in_8_bits == num_weights + norms


@pytest.mark.slow
def test_a_tied_head_is_counted_and_the_table_of_inputs_is_not() -> None:
    layer = 128 * (256 + 128 + 128 + 256) + 3 * 128 * 384 + 2 * 128
    assert count_parameters(MODEL_DIR) == Parameters(body=6 * layer + 128, head=2048 * 128)


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


def test_without_a_rate_everything_begins_at_once() -> None:
    assert arrival_times(3, rate=math.inf, burstiness=1.0, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_the_gaps_have_the_mean_of_the_rate_and_the_scatter_of_the_shape(burstiness: float) -> None:
    times = arrival_times(20_000, rate=50.0, burstiness=burstiness, seed=3)
    assert times == arrival_times(20_000, rate=50.0, burstiness=burstiness, seed=3)
    gaps = [float(gap) for gap in np.diff([0.0, *times])]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    variation = statistics.stdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


async def test_open_requests_are_bounded_begin_in_time_and_answers_keep_their_order() -> None:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    begin_s = [0.0, 0.0, 0.0, 0.01, 0.02]
    begun_s = [0.0] * 5
    num_open, most, finished = 0, 0, 0

    async def send(number: int) -> Answer:
        nonlocal num_open, most
        begun_s[number] = loop.time() - start_s
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0.001 * (5 - number))
        num_open -= 1
        return Answer(completion_tokens=number)

    def done() -> None:
        nonlocal finished
        finished += 1

    sends = [functools.partial(send, number) for number in range(5)]
    answers, _ = await run_load(sends, begin_s, max_concurrency=2, done=done)
    assert [answer.completion_tokens for answer in answers] == [0, 1, 2, 3, 4]
    assert (most, finished) == (2, 5)
    assert all(begun >= wanted for begun, wanted in zip(begun_s, begin_s, strict=True))


BURN = "import time\nwhile time.process_time() < 0.2: pass\n"
BURN_AND_STAY = BURN + "print('burnt', flush=True)\ninput()\n"


def own_cpu_s() -> float:
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def test_the_cpu_time_of_a_child_counts_while_it_runs_and_after_it_was_waited_for() -> None:
    before_s, own_before_s = tree_cpu_s(os.getpid()), own_cpu_s()
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", BURN_AND_STAY], stdin=pipe, stdout=pipe)
    assert child.stdout is not None
    assert child.stdout.readline() == b"burnt\n"
    assert tree_cpu_s(os.getpid()) - before_s > 0.15
    child.communicate(b"\n")
    took_s = tree_cpu_s(os.getpid()) - before_s
    assert took_s == pytest.approx(own_cpu_s() - own_before_s, abs=0.1)


def test_a_child_that_has_ended_has_no_memory_and_the_others_still_have_theirs() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays in the table of processes
    assert resident_bytes(os.getpid()) > 2**20
    with pytest.raises(ConfigError, match="VmRSS"):
        resident_bytes(child.pid)
    child.wait()
