"""The scheduler and the executor on CUDA: overlap, graphs, retraction, cancels and failures change
no token of the plain engine.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from aserve.messages.requests import AdmitRequest, Cancel
from tests.fakes.drafters import Stumbling, speculative
from tests.fakes.hash_model import HashModel
from tests.fakes.toy_device import TOY
from tests.gpu.cuda.places import CudaPlace, FakePlace, Place
from tests.gpu.drive import captured, request, serve
from tests.gpu.plain_engine import plain_outputs, plain_tokens
from tests.gpu.prompt_checks import assert_prompt
from tests.gpu.test_traces import MODES, STEM, Trace, assert_plain, serve_trace, traces

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "noise": {"temperature": 1.0, "seed": 5},
    "filters": SAMPLED,
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": ((5, 4.0), (3, -100.0)), "allowed_token_ids": (0, 2, 3, 5, 7, 11)},
    "bans": {"bad_word_ids": ((5,), (7, 2)), "min_tokens": 3, "end_ids": (3, 8)},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2, **SAMPLED},
    "grammar": {"grammar": TOY, **SAMPLED},
    "children": {"n": 2, **SAMPLED},
    "embedding": {"embeds": True},
}


def asked(num: int, **sampling: Any) -> list[AdmitRequest]:
    """Of different lengths, so that there are fewer and fewer rows."""
    return [
        request(f"r{n}", STEM[n : n + 12], seed=n, max_tokens=8 + 2 * n, **sampling)
        for n in range(num)
    ]


@pytest.mark.slow
def test_no_kind_of_request_makes_the_host_wait(place: Place) -> None:
    requests = [
        request(kind, STEM[number : number + 9], **sampling)
        for number, (kind, sampling) in enumerate(KINDS.items())
    ]
    model = functools.partial(HashModel, window=6)
    options: dict[str, Any] = {"depth": 3, "lead": 3, "max_batched_tokens": 16, "graph_rows": 0}
    executor = place.executor(lambda where: model(device=where), **options)
    with place.no_waits():
        served = serve(executor, requests)
    assert served.num_resyncs == 0
    for each in requests:
        for child in range(each.sampling.n):
            tokens = served.outputs.get((each.request_id, child), [])
            assert tokens == plain_outputs(model(), each, child)
            assert_prompt(model(), each, child, served)


def test_no_replay_makes_the_host_wait(place: Place) -> None:
    """Each kind of sampling has graphs of its own; the last row is greedy."""
    samplings = [{**SAMPLED, "temperature": 1.0}, {"temperature": 0.9}, {}]
    requests = [
        request(f"r{n}", STEM[n : n + 9], seed=n, max_tokens=8 + 5 * n, **sampling)
        for n, sampling in enumerate(samplings)
    ]
    executor = captured(place.executor(graph_rows=4, depth=3, lead=3))
    with place.no_waits():
        served = serve(executor, requests)
    assert served.outputs == plain_tokens(requests)
    assert place.watch.num_replays > 10


def test_lengths_are_published_between_two_parts_of_a_replay(place: Place) -> None:
    requests = asked(2)[1:]
    executor = captured(
        place.executor(mode=speculative(Stumbling(1, every=2)), graph_rows=1, depth=2, lead=2)
    )
    assert serve(executor, requests).outputs == plain_tokens(requests)
    assert place.watch.num_replays > 0


@pytest.mark.parametrize(("graph_rows", "captures_at_start"), [(0, False), (4, False), (4, True)])
def test_rows_may_leave_step_back_and_run_beside_steps_without_a_graph(
    graph_rows: int, captures_at_start: bool, place: Place
) -> None:
    """A cancel, a pool so small that rows step back, and penalties, for which there is no graph.
    The scheduler's debug checks count every page after each step.
    """
    requests = [*asked(4), request("late", STEM[:9], repetition_penalty=1.4, logprobs=2)]
    events: list[AdmitRequest | Cancel] = [*requests[:3], Cancel("r1", None, 0, "cancelled")]
    executor = place.executor(graph_rows=graph_rows, num_pages=13)
    if captures_at_start:
        captured(executor)
    served = serve(executor, [*events, *requests[3:]], chaos=graph_rows)
    assert served.num_retracted > 0
    found = served.outputs.pop(("r1", 0), [])
    assert found == plain_outputs(HashModel(), requests[1])[: len(found)]
    assert len(served.reasons["r1", 0]) == 1
    assert served.outputs == plain_tokens(each for each in requests if each.request_id != "r1")


class Greedy(HashModel):
    """Wants more memory than there is where more than one row has logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        if len(hidden) > 1 and hidden.device.type == "cuda":
            torch.empty(1 << 50, dtype=torch.uint8, device=hidden.device)
        if len(hidden) > 1:
            raise torch.OutOfMemoryError("out of memory, as the test wants it")
        return super().logits(hidden)


def test_a_step_that_runs_out_of_memory_is_tried_in_halves(place: Place) -> None:
    requests = asked(3)
    served = serve(place.executor(lambda where: Greedy(device=where)), requests)
    assert served.num_resyncs > 0
    assert served.outputs == plain_tokens(requests)


@pytest.mark.slow
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(traces(), st.none() | st.integers(0, 2**32))
def test_any_trace_is_sound_on_streams_and_gives_the_plain_engines_tokens(
    trace: Trace, seed: int | None
) -> None:
    assert_trace(trace, FakePlace(seed))


@pytest.mark.gpu
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(traces())
def test_any_trace_gives_the_plain_engines_tokens_on_cuda(trace: Trace) -> None:
    assert_trace(trace, CudaPlace())


def assert_trace(trace: Trace, place: Place) -> None:
    mode = MODES[trace.mode]()
    graph_rows = min(trace.options["graph_rows"], 2)  # each capture takes long on the fake
    options = {**trace.options, "attention": "torch-ref", "graph_rows": graph_rows}
    executor = place.executor(trace.model, mode=mode, **options)
    if trace.captures_at_start:
        captured(executor)
    served = serve_trace(executor, trace)
    place.assert_sound()
    assert_plain(trace, served)
