"""The scheduler and the executor on a device: overlap, graphs, retraction, cancels and failures
change no token of the plain engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.messages.requests import AdmitRequest, Cancel
from tests.fakes.hash_model import FlakyModel, HashModel
from tests.fakes.toy_device import TOY
from tests.fakes.two_token_mode import TwoTokens
from tests.gpu.cuda.places import CudaPlace, Place
from tests.gpu.drive import Served, request, serve
from tests.gpu.plain_engine import plain_outputs
from tests.gpu.test_traces import STEM, Trace, assert_plain, serve_trace, traces

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02}
ASKS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "noise": {"temperature": 1.0, "seed": 5},
    "filters": SAMPLED,
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": ((5, 4.0), (3, -100.0)), "allowed_token_ids": (0, 2, 3, 5, 7, 11)},
    "bans": {"bad_word_ids": ((5,), (7, 2)), "min_tokens": 3, "end_ids": (3, 8)},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2, **SAMPLED},
    "grammar": {"grammar": TOY, **SAMPLED},
    "children": {"n": 2, **SAMPLED},
}


def asked(num: int = 4, *, max_tokens: int = 10, **sampling: Any) -> list[AdmitRequest]:
    return [
        request(f"r{number}", STEM[number : number + 12], max_tokens=max_tokens, **sampling)
        for number in range(num)
    ]


def assert_plain_tokens(served: Served, requests: list[AdmitRequest]) -> None:
    plain = HashModel()
    expected = {
        (each.request_id, child): plain_outputs(plain, each, child)
        for each in requests
        for child in range(each.sampling.n)
    }
    assert served.outputs == expected


@pytest.mark.parametrize("kind", ASKS)
def test_every_way_to_sample_gives_the_plain_engines_tokens(kind: str, place: Place) -> None:
    requests = asked(3, **ASKS[kind])
    assert_plain_tokens(serve(place.executor(), requests), requests)


@pytest.mark.parametrize(("depth", "lead"), [(1, 1), (2, 2), (3, 1), (3, 3)])
def test_overlap_changes_no_token(depth: int, lead: int, place: Place) -> None:
    requests = [*asked(3, **SAMPLED), request("long", STEM[:30], max_tokens=6)]
    executor = place.executor(depth=depth, lead=lead, max_batched_tokens=16)
    assert_plain_tokens(serve(executor, requests), requests)


def test_rows_that_step_back_come_again_with_the_same_tokens(place: Place) -> None:
    requests = asked(max_tokens=20, repetition_penalty=1.3)
    served = serve(place.executor(num_pages=13), requests)
    assert served.num_retracted > 0
    assert_plain_tokens(served, requests)


def test_a_prompt_that_was_seen_before_is_read_and_not_computed(place: Place) -> None:
    requests = [request(f"r{number}", [*STEM[:16], number]) for number in range(3)]
    served = serve(place.executor(max_rows=1), requests)
    assert served.num_cached == 32
    assert_plain_tokens(served, requests)


@pytest.mark.parametrize("chaos", range(4))
def test_a_cancel_frees_its_row_and_costs_its_neighbours_nothing(chaos: int, place: Place) -> None:
    """The scheduler's debug checks count every page after each step."""
    requests = asked(4, max_tokens=20)
    events: list[AdmitRequest | Cancel] = [*requests[:3]]
    events += [Cancel("r1", None, 0, "cancelled"), requests[3]]
    served = serve(place.executor(num_pages=17), events, chaos=chaos)
    kept = [each for each in requests if each.request_id != "r1"]
    found = served.outputs.pop(("r1", 0), [])
    assert found == plain_outputs(HashModel(), requests[1])[: len(found)]
    assert len(served.reasons["r1", 0]) == 1
    assert_plain_tokens(served, kept)


def test_a_failed_step_costs_its_neighbours_no_token(place: Place) -> None:
    """Without graphs, of which a capture would count as a forward."""
    requests = asked()
    executor = place.executor(lambda where: FlakyModel({4, 7, 12}, device=where), graph_rows=0)
    served = serve(executor, requests)
    assert served.num_resyncs == 3
    assert_plain_tokens(served, requests)


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
    assert_plain_tokens(served, requests)


def test_no_operator_of_a_step_makes_the_host_wait(place: Place) -> None:
    requests = [
        request(f"{kind}-{number}", STEM[number : number + 9], **sampling)
        for kind, sampling in ASKS.items()
        for number in range(2)
    ]
    executor = place.executor(num_pages=200, depth=3, lead=3)
    with place.no_waits():
        served = serve(executor, requests)
    assert_plain_tokens(served, requests)


def test_the_same_requests_get_the_same_tokens_again(place: Place) -> None:
    requests = asked(4, logprobs=2, **SAMPLED)
    first, again = (serve(place.executor(), requests) for _ in range(2))
    assert first.outputs == again.outputs


@pytest.mark.gpu
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(traces())
def test_any_trace_gives_the_plain_engines_tokens_on_cuda(trace: Trace) -> None:
    place = CudaPlace()
    executor = place.executor(
        trace.model,
        mode=TwoTokens() if trace.two_tokens else Autoregressive(),
        **trace.options | {"attention": "torch-ref"},
    )
    assert_plain(trace, serve_trace(executor, trace))
