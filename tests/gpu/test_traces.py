"""The whole device side under the real scheduler, on random traces: each request gets the tokens of
the plain engine, whatever runs beside it, in which order, and whatever fails.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.messages import AdmitRequest
from tests.fakes import TOY, min_tokens_of
from tests.gpu.drive import Served, make_executor, request, serve
from tests.gpu.graph_device import GraphDevice
from tests.gpu.hash_model import VOCAB, FlakyModel, HashModel
from tests.gpu.plain_engine import plain_outputs
from tests.gpu.prompt_checks import assert_prompt
from tests.gpu.two_token_mode import TwoTokens

STEM = [(11 * i * i + 5 * i + 3) % VOCAB for i in range(40)]  # what prompts share


EXTRAS: dict[str, st.SearchStrategy[Any]] = {
    "presence_penalty": st.sampled_from([0.0, 0.5]),
    "frequency_penalty": st.sampled_from([0.0, -0.7]),
    "repetition_penalty": st.sampled_from([1.0, 1.2]),
    "logit_bias": st.sampled_from([(), ((5, 4.0), (3, -100.0))]),
    "min_tokens": st.integers(0, 4),
    "grammar": st.sampled_from([None, None, TOY]),
    "allowed_token_ids": st.sampled_from([(), (), (0, 2, 3, 5, 7, 11, 13)]),
    "bad_word_ids": st.sampled_from([(), ((5,), (7, 2), (2, 11, 0))]),
    "logprobs": st.sampled_from([None, 0, 3]),
    "prompt_logprobs": st.sampled_from([None, 0, 2]),
}


@dataclass(frozen=True)
class Trace:
    requests: list[AdmitRequest]
    options: dict[str, Any]
    window: int | None
    fails: frozenset[int]
    two_tokens: bool
    captures_at_start: bool
    chaos: int


@st.composite
def requests(draw: st.DrawFn, number: int, *, is_plain: bool) -> AdmitRequest:
    """A plain one has nothing that makes its decode steps run eagerly."""
    prompt = STEM[: draw(st.integers(1, 24))]
    if draw(st.booleans()):
        prompt[-1] = draw(st.integers(0, VOCAB - 1))
    embeds = draw(st.sampled_from([False, False, True]))
    extras = {} if is_plain else draw(st.fixed_dictionaries(EXTRAS))
    return request(
        f"r{number}",
        prompt,
        embeds=embeds,
        end_ids=draw(st.sampled_from([(), (3, 8)])),
        seed=draw(st.integers(-(2**63), 2**63)),
        temperature=draw(st.sampled_from([0.0, 0.8, 1.0])),
        top_k=draw(st.sampled_from([0, 0, 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.7])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        max_tokens=0 if embeds else draw(st.integers(0, 12)),
        n=1 if embeds else draw(st.sampled_from([1, 1, 2])),
        **extras,
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    depth, lead = draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (3, 3)]))
    alone = -(-36 // page_size)  # the longest request
    gaps = draw(st.lists(st.integers(3, 20), max_size=4))
    is_plain = draw(st.booleans())
    numbers = range(draw(st.integers(1, 6)))
    return Trace(
        requests=[draw(requests(number, is_plain=is_plain)) for number in numbers],
        options={
            "page_size": page_size,
            "num_pages": alone + 1 + draw(st.sampled_from([0, 1, 3, 100])),
            "depth": depth,
            "lead": lead,
            "max_rows": draw(st.integers(1, 5)),
            "max_batched_tokens": draw(st.sampled_from([3, 8, 64])),
            "prefix_cache": draw(st.booleans()),
            "attention": draw(st.sampled_from(["paged-sdpa", "torch-ref"])),
            "graph_rows": draw(st.sampled_from([0, 1, 3, 5])),
        },
        window=draw(st.sampled_from([None, 6])),
        fails=frozenset(sum(gaps[: number + 1]) for number in range(len(gaps))),
        two_tokens=draw(st.booleans()),
        captures_at_start=draw(st.booleans()),
        chaos=draw(st.integers(0, 2**32)),
    )


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(traces())
def test_any_trace_gives_the_tokens_of_the_plain_engine(trace: Trace) -> None:
    model = FlakyModel(trace.fails, window=trace.window)
    mode = TwoTokens() if trace.two_tokens else Autoregressive()
    device = GraphDevice(failing_replays=trace.fails)
    executor = make_executor(model, mode=mode, device=device, **trace.options)
    if trace.captures_at_start:
        executor.capture_graphs(lambda _done, _total: None)
    assert_plain(trace, serve(executor, trace.requests, chaos=trace.chaos))


def assert_plain(trace: Trace, served: Served) -> None:
    """Each request has the tokens, scores and end of the plain engine."""
    plain = HashModel(window=trace.window)
    for asked in trace.requests:
        for child in range(asked.sampling.n):
            expected = plain_outputs(plain, asked, child)
            assert served.outputs.get((asked.request_id, child), []) == expected
            has_end = bool(expected) and expected[-1] in asked.end_ids
            reason = (
                "stop" if has_end and len(expected) > min_tokens_of(asked.sampling) else "length"
            )
            assert served.reasons[asked.request_id, child] == [reason]
            assert_prompt(plain, asked, child, served)


def test_a_tiny_pool_makes_rows_step_back_and_changes_no_token() -> None:
    asked = [
        request(f"r{number}", STEM[number : number + 12], max_tokens=20, repetition_penalty=1.3)
        for number in range(4)
    ]
    served = serve(make_executor(HashModel(), num_pages=13), asked)
    assert served.num_retracted > 0
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}


def test_a_failed_step_costs_its_neighbours_no_token() -> None:
    asked = [request(f"r{number}", STEM[number : number + 9]) for number in range(4)]
    served = serve(make_executor(FlakyModel({4, 7, 12})), asked)
    assert served.num_resyncs == 3
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}


@pytest.mark.parametrize("lead", [1, 3])
def test_bad_words_are_never_emitted_however_far_the_scheduler_runs_ahead(lead: int) -> None:
    """What a row would say is forbidden it pair by pair, under retraction: no pair comes through,
    and each row gets the tokens of the plain engine.
    """
    free = [request(f"r{number}", STEM[number : number + 12], max_tokens=20) for number in range(4)]
    said = [plain_outputs(HashModel(), asked) for asked in free]
    words = [tuple(itertools.pairwise(tokens)) for tokens in said]
    asked = [
        msgspec.structs.replace(each, bad_word_ids=(*pairs, (pairs[0][0],)))
        for each, pairs in zip(free, words, strict=True)
    ]
    executor = make_executor(HashModel(), num_pages=13, depth=lead, lead=lead)
    served = serve(executor, asked)
    assert served.num_retracted > 0
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}
    for each in asked:
        tokens = served.outputs[each.request_id, 0]
        assert not set(itertools.pairwise(tokens)) & set(each.bad_word_ids)
        assert each.bad_word_ids[-1][0] not in tokens


def test_a_prefix_hit_counts_its_tokens_for_penalties() -> None:
    """Trap 3: a history is what lies beside the KV, not what this row's steps have shown. What the
    cache had is penalised, and so is the token that is still in flight.
    """
    asked = [
        request(f"r{number}", [*STEM[:16], number], repetition_penalty=2.0, presence_penalty=1.0)
        for number in range(2)
    ]
    served = serve(make_executor(HashModel(), max_rows=1), asked)
    assert served.num_cached == 16
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}
