"""Captured steps on a device: the same tokens as without them, also where rows are padded,
cancelled or step back.
"""

from __future__ import annotations

from typing import Any

import pytest

from aserve.gpu.executor import TorchExecutor
from aserve.messages.requests import AdmitRequest, Cancel
from tests.fakes.hash_model import HashModel
from tests.fakes.two_token_mode import TwoTokens
from tests.gpu.cuda.places import Place
from tests.gpu.drive import Served, request, serve
from tests.gpu.plain_engine import plain_outputs
from tests.gpu.test_traces import STEM

GRAPH_ROWS = 4  # graphs of 1, 2 and 4 rows
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "noise": {"temperature": 0.9},
    "filter": {"temperature": 1.0, "top_k": 7, "top_p": 0.8, "min_p": 0.02},
}


def captured(place: Place, *, graph_rows: int = GRAPH_ROWS, **options: Any) -> TorchExecutor:
    """With all graphs that there may be."""
    executor = place.executor(graph_rows=graph_rows, **options)
    with place.loading():
        executor.capture_graphs(lambda _done, _total: None)
    return executor


def asked(num: int, **sampling: Any) -> list[AdmitRequest]:
    """Of different lengths, so that there are fewer and fewer rows."""
    return [
        request(f"r{n}", STEM[n : n + 12], seed=n, max_tokens=6 + 2 * n, **sampling)
        for n in range(num)
    ]


def assert_plain_tokens(served: Served, requests: list[AdmitRequest]) -> None:
    expected = {(each.request_id, 0): plain_outputs(HashModel(), each) for each in requests}
    assert served.outputs == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_replayed_steps_give_the_plain_engines_tokens(sampling: str, place: Place) -> None:
    requests = asked(3, **SAMPLINGS[sampling])
    assert_plain_tokens(serve(captured(place), requests), requests)
    assert place.watch.num_replays > 10


def test_steps_that_no_graph_is_for_run_between_those_that_are_replayed(place: Place) -> None:
    """Prompts, penalties and logprobs are not captured."""
    requests = [*asked(3), request("late", STEM[:9], repetition_penalty=1.4, logprobs=2)]
    served = serve(captured(place, max_batched_tokens=8), requests, chaos=3)
    assert_plain_tokens(served, requests)
    assert place.watch.num_replays > 0


def test_graphs_that_are_captured_while_it_serves_change_no_token(place: Place) -> None:
    requests = asked(5)
    executor = place.executor(graph_rows=GRAPH_ROWS)
    assert_plain_tokens(serve(executor, requests), requests)


@pytest.mark.parametrize("chaos", range(3))
def test_rows_come_and_go_while_steps_are_replayed(chaos: int, place: Place) -> None:
    """A cancel, and a pool so small that rows step back."""
    requests = asked(4)
    events: list[AdmitRequest | Cancel] = [*requests, Cancel("r1", None, 0, "cancelled")]
    served = serve(captured(place, num_pages=13), events, chaos=chaos)
    found = served.outputs.pop(("r1", 0), [])
    assert found == plain_outputs(HashModel(), requests[1])[: len(found)]
    assert_plain_tokens(served, [each for each in requests if each.request_id != "r1"])


@pytest.mark.parametrize("lead", [1, 2])
def test_lengths_are_published_between_two_parts_of_a_replay(lead: int, place: Place) -> None:
    requests = asked(2)
    executor = captured(place, graph_rows=2, mode=TwoTokens(), depth=2, lead=lead)
    assert_plain_tokens(serve(executor, requests), requests)
    assert place.watch.num_replays > 0


def test_no_operator_around_a_replay_makes_the_host_wait(place: Place) -> None:
    requests = [
        request(f"r{n}", STEM[n : n + 9], seed=n, max_tokens=12, **sampling)
        for n, sampling in enumerate(SAMPLINGS.values())
    ]
    executor = captured(place, depth=3, lead=3)
    with place.no_waits():
        served = serve(executor, requests)
    assert_plain_tokens(served, requests)
