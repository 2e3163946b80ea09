"""The scheduler against the oracle, on random traces: same tokens as the plain engine, one final
message each, every row and page owned once, whatever the order of events, depth, lead, page size,
failures and cancels. A failing trace is saved, and `aserve replay` runs it again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aserve.actors.replay import replay
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import DecodeCaps, EngineSpec, GroupSpec
from aserve.messages.requests import AdmitRequest, ReasoningIds, SamplingParams
from aserve.messages.results import StepTimes
from aserve.messages.step import DraftTree, stamp_of
from tests.fakes.hash_model import HashModel
from tests.fakes.toy_device import TOY
from tests.gpu.drive import make_executor, request, serve
from tests.stories import POISON_SEED
from tests.traces import Trace, TraceRun

PROFILE = os.environ.get("ASERVE_TEST_PROFILE", "default")
# Of 33 mutants, 250 traces kill 28, 400 kill 29 and the 1,000 of `make mutants` all.
NUM_TRACES = {"default": 250, "mutants": 1_000, "large": 3_000}[PROFILE]
NUM_FRESH_TRACES = {"default": 600, "mutants": 1_000, "large": 10_000}[PROFILE]
# A mutant need only be found; a failure is saved, so that a small one is worth no hours either.
PHASES = (Phase.explicit, Phase.generate, *(() if PROFILE != "default" else (Phase.shrink,)))
FAILED_TRACE = Path(__file__).parent / "failed.trace"
VOCAB = 11
PACES = [(depth, lead) for depth in range(1, 5) for lead in range(1, depth + 1)]
BASES = [[(7 * i * i + 3 * i + base) % VOCAB for i in range(40)] for base in range(3)]


# Tags of a small vocabulary, so that outputs begin and end them by chance.
tags = st.sampled_from([((5,),), ((6, 6),), ((2,), (7, 8)), ((3, 9, 3),)])
reasoning_ids = st.builds(
    ReasoningIds, tags, tags, is_open=st.booleans(), max_tokens=st.none() | st.integers(0, 6)
)


@st.composite
def requests(draw: st.DrawFn, number: int, *, poison: bool, has_masks: bool) -> AdmitRequest:
    prompt_len = draw(st.integers(1, 22))
    prompt = list(draw(st.sampled_from(BASES))[:prompt_len])
    if draw(st.booleans()):
        prompt[-1] = draw(st.integers(0, VOCAB - 1))
    embeds = draw(st.sampled_from([False, False, False, True]))
    max_tokens = 0 if embeds else draw(st.one_of(st.integers(0, 12), st.integers(9, 18)))
    n = 1 if embeds else draw(st.sampled_from([1, 1, 1, 2, 3]))
    num_before = draw(st.sampled_from([0, 0, 0, 1, 3]))
    outputs = tuple(
        pack_i32([draw(st.integers(1, VOCAB - 1)) for _ in range(min(num_before, max_tokens))])
        for _ in range(n)
    )
    has_grammar = has_masks and draw(st.sampled_from([False, False, True]))
    is_causal = draw(st.sampled_from([True, True, False]))
    seed = POISON_SEED if poison else number  # a row is known by its parameters
    return AdmitRequest(
        request_id=f"r{number}",
        prompt_ids=pack_i32(np.asarray(prompt)),
        sampling=SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, 3)),
            n=1 if poison else n,
            allowed_token_ids=draw(st.sampled_from([(), (), (1, 2, 3)])),
            grammar=TOY if has_grammar else None,
            logprobs=draw(st.sampled_from([None, None, 0, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
        ),
        embeds=embeds,
        awaits_kv=max_tokens > 0 and is_causal and draw(st.sampled_from([False, False, True])),
        is_causal=is_causal,
        end_ids=draw(st.sampled_from([(), (0,), (0, 4)])),
        bad_word_ids=draw(st.sampled_from([(), ((1, 2), (3,))])),
        priority=draw(st.integers(0, 2)),
        client=draw(st.sampled_from(["", "", "a", "b"])),
        namespace=draw(st.sampled_from(["", "", "salt"])),
        outputs=outputs if num_before and not poison and not has_grammar else (),
        reasoning=draw(st.none() | reasoning_ids),
    )


@st.composite
def specs(draw: st.DrawFn) -> EngineSpec:
    page_size = draw(st.sampled_from([1, 1, 2, 2, 3, 4, 8, 16, 64]))
    depth, lead = draw(st.sampled_from(PACES))
    most = -(-40 // page_size)
    # Every other pool is hardly larger than one long request needs, so that rows must step back.
    num_pages = draw(st.one_of(st.integers(most // 2, most), st.integers(2, 3 * most)))
    groups = [GroupSpec("full", 2 + num_pages)]
    for number in range(draw(st.sampled_from([0, 0, 1, 2]))):
        window = draw(st.integers(2, 9))
        num_pages = -(-window // page_size) + draw(st.integers(3, 12))
        groups.append(GroupSpec(f"window {number}", num_pages, window))
    tree = draw(st.none() | st.builds(DraftTree, max_depth=st.integers(1, 4)))
    most = draw(st.sampled_from([1, 1, 2, 3])) if tree is None else 5
    root_len = draw(st.sampled_from([1, 1, 1, 0])) if tree is None else 1
    is_chain = tree is None and root_len > 0
    return EngineSpec(
        page_size=page_size,
        groups=tuple(groups),
        max_rows=draw(st.integers(1, 5)),
        max_model_len=64,
        max_batched_tokens=draw(st.sampled_from([1, 2, 3, 5, 8, 16, 64])),
        vocab_size=VOCAB,
        depth=depth,
        lead=lead,
        max_waiting=draw(st.sampled_from([2, 64])),
        prefix_cache=draw(st.booleans()),
        decode=DecodeCaps(
            min_tokens_per_step=draw(st.sampled_from([1, 1, 0])),
            max_tokens_per_step=most,
            root_len=root_len,
            mixes_prefill=draw(st.booleans()),
            tree=tree,
            key_lookahead=draw(st.sampled_from([0, 0, 1])) if is_chain else 0,
            continues_repeats=is_chain and draw(st.booleans()),
        ),
        names_shared_pages=draw(st.booleans()),
        max_mixed_prefill_tokens=draw(st.sampled_from([None, 1, 4])),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    num_requests = draw(st.integers(1, 7))
    poisoned = draw(st.sampled_from([-1, -1, -1, 0, 1]))
    spec = draw(specs())
    has_masks = spec.decode.root_len > 0
    return Trace(
        spec=spec,
        requests=tuple(
            draw(requests(number, poison=number == poisoned, has_masks=has_masks))
            for number in range(num_requests)
        ),
        seed=draw(st.integers(0, 2**32)),
        cancel_rate=draw(st.sampled_from([0.0, 0.0, 0.03, 0.15])),
        amend_rate=draw(st.sampled_from([0.0, 0.0, 0.05, 0.2])),
        fail_rate=draw(st.sampled_from([0.0, 0.0, 0.1, 0.3])),
        mask_fail_rate=draw(st.sampled_from([0.0, 0.0, 0.0, 0.1])),
        transfer_fail_rate=draw(st.sampled_from([0.0, 0.0, 0.2])),
        events_per_turn=draw(st.sampled_from([1, 1, 3, 6])),
        times=draw(st.none() | times_of(spec.decode)),
    )


@st.composite
def tier_traces(draw: st.DrawFn) -> Trace:
    """Prompts that begin alike come one after the other, and the prefix cache forgets them."""
    trace = draw(traces())
    spec = msgspec.structs.replace(
        trace.spec,
        prefix_cache=True,
        kv_tiers=draw(st.sampled_from(["write_through", "write_back"])),
    )
    requests = [
        msgspec.structs.replace(
            each,
            prompt_ids=pack_i32(BASES[0][: draw(st.integers(4, 22))]),
            awaits_kv=draw(st.sampled_from([False] * 5 + [each.awaits_kv])),
            is_causal=True,
        )
        for each in trace.requests
    ]
    return msgspec.structs.replace(
        trace,
        spec=spec,
        requests=tuple(requests),
        max_stored=draw(st.sampled_from([3, 100])),
        lone_rate=draw(st.sampled_from([0.3, 1.0])),
    )


@st.composite
def recurrent_traces(draw: st.DrawFn) -> Trace:
    """Of a model whose rows have a state at their ends alone, with some checkpoints or none. A row
    that computes all of its tokens one by one, and fails now and then, would begin anew for ever.
    """
    trace = draw(traces())
    num_checkpoints = draw(st.sampled_from([0, 2, 4, 30]))
    spec = msgspec.structs.replace(
        trace.spec,
        groups=trace.spec.groups[:1],
        max_batched_tokens=max(5, trace.spec.max_batched_tokens),
        prefix_cache=num_checkpoints > 0,
        num_checkpoints=num_checkpoints,
        checkpoint_interval=draw(st.sampled_from([1, 4, 16])),
        decode=DecodeCaps(
            is_recurrent=True, max_tokens_per_step=draw(st.sampled_from([1, 1, 2, 4]))
        ),
    )
    requests = [msgspec.structs.replace(each, awaits_kv=False) for each in trace.requests]
    return msgspec.structs.replace(
        trace,
        spec=spec,
        requests=tuple(requests),
        fail_rate=min(trace.fail_rate, 0.1),
        times=None,
    )


def times_of(caps: DecodeCaps) -> st.SearchStrategy[StepTimes | None]:
    """Drafts pay always, if half of them are accepted, or hardly ever."""
    most = caps.max_tokens_per_step - caps.root_len
    if most < 1 or not caps.root_len:
        return st.none()
    costs = st.sampled_from([1.2, 1.7, 0.95 * (1 + most)])
    return costs.map(
        lambda cost: StepTimes((1, 5), (1.0, 2.0), {0: (1.1, 2.2), most: (cost, 2 * cost)})
    )


SETTINGS = settings(phases=PHASES, deadline=None, suppress_health_check=list(HealthCheck))


@settings(SETTINGS, max_examples=NUM_TRACES, derandomize=True, database=None)
@given(traces())
def test_any_trace_gives_the_tokens_of_the_plain_engine(trace: Trace) -> None:
    """The same traces in every run."""
    run_and_save(trace)


@settings(SETTINGS, max_examples=NUM_TRACES // 4, derandomize=True, database=None)
@given(tier_traces())
def test_tiers_below_the_prefix_cache_change_no_token(trace: Trace) -> None:
    run_and_save(trace)


@settings(SETTINGS, max_examples=NUM_TRACES // 2, derandomize=True, database=None)
@given(recurrent_traces())
def test_rows_with_a_state_go_on_where_they_ended_or_begin_at_a_checkpoint(trace: Trace) -> None:
    run_and_save(trace)


if "ASERVE_TEST_SEED" in os.environ:  # set in the large profile: conftest.py

    @settings(SETTINGS, max_examples=NUM_FRESH_TRACES, derandomize=False)
    @given(traces())
    def test_any_trace_of_a_fresh_seed_gives_the_tokens_of_the_plain_engine(trace: Trace) -> None:
        run_and_save(trace)


def on_ranks(trace: Trace, dp_size: int) -> Trace:
    """The trace on data-parallel ranks. KV of other engines is not supported there."""
    return msgspec.structs.replace(
        trace,
        spec=msgspec.structs.replace(
            trace.spec, dp_size=dp_size, max_rows=max(trace.spec.max_rows, dp_size)
        ),
        requests=tuple(msgspec.structs.replace(each, awaits_kv=False) for each in trace.requests),
    )


@settings(SETTINGS, max_examples=NUM_TRACES // 5, derandomize=True, database=None)
@given(traces(), st.integers(2, 3))
def test_any_trace_on_data_parallel_ranks_gives_the_tokens_of_the_plain_engine(
    trace: Trace, dp_size: int
) -> None:
    run_and_save(on_ranks(trace, dp_size))


def run_and_save(trace: Trace) -> None:
    run = TraceRun(trace)
    try:
        run.run()
    except BaseException:
        run.save(FAILED_TRACE)
        raise


def test_a_saved_trace_replays_to_the_same_effects(tmp_path: Path) -> None:
    requests = tuple(
        AdmitRequest(
            request_id=f"r{number}",
            prompt_ids=pack_i32(BASES[number % 3][: 5 + number]),
            sampling=SamplingParams(seed=number, max_tokens=9, n=2),
        )
        for number in range(4)
    )
    spec = EngineSpec(
        page_size=2,
        groups=(GroupSpec("full", 20),),
        max_rows=4,
        max_model_len=64,
        max_batched_tokens=8,
        vocab_size=VOCAB,
        names_shared_pages=True,
        decode=DecodeCaps(max_tokens_per_step=3),
    )
    rates: dict[str, Any] = {"cancel_rate": 0.05, "amend_rate": 0.2, "fail_rate": 0.1}
    times = StepTimes((1, 4), (1.0, 2.0), {0: (1.0, 2.0), 2: (1.5, 3.0)})
    run = TraceRun(Trace(spec=spec, requests=requests, seed=5, times=times, **rates))
    run.run()
    run.save(tmp_path / "saved.trace")
    lines = list(replay(tmp_path / "saved.trace"))
    assert run.num_answered > 5
    assert run.checks.num_shared_pages > 0
    assert len(lines) > run.num_launched  # raises if any turn's effects differ


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
