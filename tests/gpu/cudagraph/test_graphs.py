"""Decode steps that are replayed: the tokens of the plain engine, and nothing else touched."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from aserve.messages.base import array_i32
from aserve.messages.results import StepResult
from tests.fakes.gated_model import TIMEOUT_S, Gate, HookedModel
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.two_token_mode import TwoTokens
from tests.gpu.batch_builder import BatchBuilder
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs

PROMPT = [(7 * i * i + 2 * i) % VOCAB for i in range(15)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "noise": {"temperature": 0.9},
    "filter": {"temperature": 1.0, "top_k": 7, "top_p": 0.8, "min_p": 0.02},
}


def nothing(_done: int, _total: int) -> None:
    pass


@pytest.mark.parametrize("attention", ["torch-ref", "paged-sdpa"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("is_lazy", [True, False])
def test_replayed_steps_give_the_plain_engines_tokens(
    *, sampling: str, is_lazy: bool, attention: str
) -> None:
    """Three rows in graphs of one, two and four."""
    asked = [
        request(f"r{seed}", PROMPT[seed:], seed=seed, max_tokens=9 + seed, **SAMPLINGS[sampling])
        for seed in range(3)
    ]
    device = GraphDevice()
    executor = make_executor(HashModel(window=6), device=device, graph_rows=4, attention=attention)
    if not is_lazy:
        executor.capture_graphs(nothing)
    served = serve(executor, asked)
    expected = {(r.request_id, 0): plain_outputs(HashModel(window=6), r) for r in asked}
    assert served.outputs == expected
    assert device.num_replays > 10 or is_lazy  # how many are lazy is up to the threads


def test_all_graphs_are_captured_at_start_when_that_is_wanted_and_no_more_later() -> None:
    device = GraphDevice()
    executor = make_executor(HashModel(), device=device, graph_rows=5)
    seen: list[tuple[int, int]] = []
    executor.capture_graphs(lambda done, total: seen.append((done, total)))
    assert seen == [(number, 12) for number in range(1, 13)]  # 1, 2, 4, 5 rows, three samplings
    asked = request("r", PROMPT, max_tokens=6)
    assert serve(executor, [asked]).outputs["r", 0] == plain_outputs(HashModel(), asked)
    assert (device.num_captures, device.num_replays) == (12, 5)


@pytest.mark.parametrize(
    ("options", "about"),
    [
        ({}, ", graphs of up to 5 rows"),  # as many as there may be
        ({"graph_rows": 3}, ", graphs of up to 3 rows"),
        ({"graph_rows": 0}, ", no graphs"),
    ],
)
def test_the_banner_says_how_far_graphs_go(options: dict[str, Any], about: str) -> None:
    executor = make_executor(HashModel(), device=GraphDevice(), **options)
    assert executor.about.endswith(about)
    assert "graphs" not in make_executor(HashModel(), **options).about


@pytest.mark.parametrize("lead", [1, 2])
def test_two_tokens_a_step_publish_their_lengths_between_two_parts_of_a_replay(lead: int) -> None:
    asked = [request(f"r{seed}", PROMPT[seed:], seed=seed, max_tokens=20) for seed in range(3)]
    device = GraphDevice()
    executor = make_executor(
        HashModel(), mode=TwoTokens(), device=device, graph_rows=4, depth=2, lead=lead
    )
    executor.capture_graphs(nothing)
    served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}
    assert device.num_replays > 10


# ---------------------------------------------------------------- when a graph is captured


async def test_nothing_is_captured_while_a_step_waits() -> None:
    """The second step wishes for a graph; the first is held up until three more wait behind it."""
    device, gate = GraphDevice(), Gate()
    captures_before: list[int] = []

    def note() -> None:
        captures_before.append(device.num_captures)

    model = HookedModel({2: gate, 3: note, 4: note})
    executor = make_executor(model, device=device, graph_rows=1)
    executor.start(asyncio.get_running_loop())
    try:
        builder = BatchBuilder(executor.spec)
        tickets = [executor.launch(builder.batch({2: PROMPT}, sampling=[2]))]
        tickets += [executor.launch(builder.batch({2: [-2]}, sampling=[2])) for _ in range(3)]
        gate.wait_until_there()
        gate.open()
        outcomes = [await ticket for ticket in tickets]
        assert captures_before == [0, 0]
        assert await asyncio.to_thread(device.has_captured.wait, TIMEOUT_S)
        outcomes.append(await executor.launch(builder.batch({2: [-2]}, sampling=[2])))
    finally:
        executor.close()
    assert device.num_replays == 1
    tokens = [array_i32(o.tokens)[0] for o in outcomes if isinstance(o, StepResult)]
    assert tokens == plain_outputs(HashModel(), request("plain", PROMPT, max_tokens=5))


def test_a_failing_capture_leaves_its_kind_of_sampling_eager_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = [request(f"r{seed}", PROMPT[seed:], seed=seed) for seed in range(3)]
    device = GraphDevice(failing_captures={2})
    executor = make_executor(HashModel(), device=device, graph_rows=4)
    with caplog.at_level(logging.WARNING, logger="aserve.gpu.cudagraph.graphs"):
        executor.capture_graphs(nothing)
        served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}
    assert device.num_captures == 7  # of 9: two of noise were given up
    [record] = [each for each in caplog.records if each.name == "aserve.gpu.cudagraph.graphs"]
    assert (
        "sampling=noise run without graphs, because capturing 4 rows failed" in record.getMessage()
    )


def test_a_replay_that_fails_costs_its_neighbours_no_token() -> None:
    asked = [request(f"r{seed}", PROMPT[seed:], max_tokens=12) for seed in range(3)]
    device = GraphDevice(failing_replays={3, 8})
    executor = make_executor(HashModel(), device=device, graph_rows=4)
    executor.capture_graphs(nothing)
    served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}
    assert served.num_resyncs == 2


def test_a_mode_declares_the_widths_that_are_captured() -> None:
    """Verify windows of a width that is not declared run eagerly, with the same tokens."""
    asked = [request("r", PROMPT, max_tokens=12)]
    captures: dict[tuple[int, ...], int] = {}
    for widths in ((1,), (1, 2)):
        device, mode = GraphDevice(), TwoTokens()
        mode.graph_widths = widths
        executor = make_executor(HashModel(), mode=mode, device=device, graph_rows=1)
        executor.capture_graphs(nothing)
        captures[widths] = device.num_captures
        served = serve(executor, asked)
        assert served.outputs == {("r", 0): plain_outputs(HashModel(), asked[0])}
        assert (device.num_replays > 0) == (2 in widths)
    assert captures == {(1,): 3, (1, 2): 6}
