"""An engine that has run for weeks: steps whose numbers fit no int32, nor 32 bits at all."""

from __future__ import annotations

import pytest

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import DecodeCaps, EngineSpec, GroupSpec
from aserve.messages.requests import AdmitRequest, SamplingParams, stamp_of
from tests.fakes.hash_model import HashModel
from tests.fakes.toy_device import TOY
from tests.gpu.drive import make_executor, request, serve
from tests.traces import Trace, TraceRun

STARTS = [2**31 - 6, 2**32 - 6, 2**63 - 400]


def test_stamps_are_iterations_that_fit_int32_and_never_nothing() -> None:
    assert [stamp_of(number) for number in (1, 2, 2**31 - 1)] == [1, 2, 2**31 - 1]
    late = [stamp_of(start + number) for start in STARTS for number in range(12)]
    assert min(late) >= 1
    assert array_i32(pack_i32(late)).tolist() == late
    assert all(stamp_of(number) != stamp_of(number + 1) for number in range(2**31 - 9, 2**31 + 9))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", [1, 3])
def test_traces_cross_the_border_of_32_bits(start: int, window: int) -> None:
    spec = EngineSpec(
        page_size=2,
        groups=(GroupSpec("full", 30),),
        max_rows=3,
        max_model_len=64,
        max_batched_tokens=8,
        vocab_size=11,
        decode=DecodeCaps(max_tokens_per_step=window),
    )
    requests = tuple(
        AdmitRequest(
            f"r{number}",
            pack_i32([number, 3, 1, 4]),
            SamplingParams(seed=number, max_tokens=9, grammar=TOY if number == 1 else None),
        )
        for number in range(4)
    )
    run = TraceRun(Trace(spec=spec, requests=requests, seed=start, fail_rate=0.1))
    run.scheduler.state.next_iteration = start
    run.device.last_iteration = start - 1
    run.run()
    assert run.scheduler.state.next_iteration > start + 12


@pytest.mark.parametrize("start", STARTS)
def test_the_executor_crosses_the_border_of_32_bits(start: int) -> None:
    """With debug checks: every read of the relay meets the step that it expects."""
    requests = [request("a", [1, 2, 3]), request("b", [4, 5], grammar=TOY)]
    early = serve(make_executor(HashModel()), requests)
    late = serve(make_executor(HashModel()), requests, first_iteration=start)
    assert late.outputs == early.outputs
    assert late.reasons == early.reasons
    assert late.batches[-1].iteration > start + 6
