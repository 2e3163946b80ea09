"""When graphs of decode steps are captured, and which; random traces show what replays give."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.fakes.gated_model import TIMEOUT_S, Gate, HookedModel
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import VOCAB, HashModel
from tests.gpu.batch_builder import running, tokens_of
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs, plain_tokens

PROMPT = [(7 * i * i + 2 * i) % VOCAB for i in range(15)]


def test_all_graphs_are_captured_at_start_when_that_is_wanted_and_no_more_later() -> None:
    """By default there are graphs for as many rows as there may be."""
    device = GraphDevice()
    executor = make_executor(HashModel(), device=device)
    seen: list[tuple[int, int]] = []
    executor.capture_graphs(lambda done, total: seen.append((done, total)))
    assert seen == [(number, 12) for number in range(1, 13)]  # 1, 2, 4, 5 rows, three samplings
    asked = request("r", PROMPT, max_tokens=6)
    assert serve(executor, [asked]).outputs == plain_tokens([asked])
    assert (device.num_captures, device.num_replays) == (12, 5)


async def test_nothing_is_captured_while_a_step_waits() -> None:
    """The second step wishes for a graph; the first is held up until three more wait behind it."""
    device, gate = GraphDevice(), Gate()
    captures_before: list[int] = []

    def note() -> None:
        captures_before.append(device.num_captures)

    model = HookedModel({2: gate, 3: note, 4: note})
    executor = make_executor(model, device=device, graph_rows=1)
    async with running(executor) as builder:
        tickets = [executor.launch(builder.batch({2: PROMPT}, sampling=[2]))]
        tickets += [executor.launch(builder.batch({2: [-2]}, sampling=[2])) for _ in range(3)]
        gate.wait_until_there()
        gate.open()
        tokens = [token for ticket in tickets for token in tokens_of(await ticket)]
        assert captures_before == [0, 0]
        assert await asyncio.to_thread(device.has_captured.wait, TIMEOUT_S)
        tokens += tokens_of(await executor.launch(builder.batch({2: [-2]}, sampling=[2])))
    assert device.num_replays == 1
    assert tokens == plain_outputs(HashModel(), request("plain", PROMPT, max_tokens=5))


def test_a_failing_capture_leaves_larger_steps_eager_and_smaller_ones_with_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Captures go from 4 rows to 1: the first of noise fails, and those of 2 rows and 1 succeed."""
    asked = [request(f"r{seed}", PROMPT[seed:], seed=seed, temperature=1.0) for seed in range(3)]
    device = GraphDevice(failing_captures={2})
    executor = make_executor(HashModel(), device=device, graph_rows=4)
    with caplog.at_level(logging.WARNING, logger="aserve.gpu.cudagraph.graphs"):
        served = serve(captured(executor), asked)
    assert served.outputs == plain_tokens(asked)
    assert device.num_captures == 9  # those of 3 rows are not tried again
    assert device.num_replays > 2
    [record] = [each for each in caplog.records if each.name == "aserve.gpu.cudagraph.graphs"]
    words = "steps with rows=4 or more, width=1 and sampling=noise run without graphs"
    assert words in record.getMessage()


def test_a_graph_that_was_captured_before_a_smaller_one_failed_is_replayed() -> None:
    asked = [
        request(f"r{seed}", PROMPT[:3], seed=seed, max_tokens=12, temperature=1.0)
        for seed in range(4)
    ]
    device = GraphDevice(failing_captures={5})  # noise with 2 rows
    served = serve(captured(make_executor(HashModel(), device=device, graph_rows=4)), asked)
    assert served.outputs == plain_tokens(asked)
    assert device.num_replays > 2
