"""Captured forwards of steps that are not replayed as a whole: prompts, chunks, mixed steps, and
decodes of rows with penalties, logprobs or masks.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from aserve.gpu.cudagraph.forwards import (
    EAGER,
    FINE_FROM,
    FORWARD,
    PIECES,
    REPLAYED,
    ForwardGraphs,
    token_counts,
)
from aserve.gpu.cudagraph.graphs import StepGraph, StepGraphs
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.requests import AdmitRequest
from aserve.tiny import MODEL_DIR
from tests.fakes.cuda import FakeCuda
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import VOCAB, HashModel
from tests.gpu.cuda.test_engine import KINDS
from tests.gpu.device.cuda.test_device import executor_on
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_run, plain_tokens
from tests.load_model import load_model

STEM = [(11 * i * i + 5 * i + 3) % VOCAB for i in range(40)]
NO_SUCH_ID = 10**9


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each step ran, in launch order."""
    kinds: list[str] = []
    real = StepGraphs.ran

    def noted(graphs: StepGraphs, graph: StepGraph | None) -> str:
        kinds.append(real(graphs, graph))
        return kinds[-1]

    monkeypatch.setattr(StepGraphs, "ran", noted)
    return kinds


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[ForwardBatch]:
    """Whatever an earlier step left in static buffers is destroyed before each replay."""
    seen: list[ForwardBatch] = []
    real = ForwardGraphs.run

    def run(graphs: ForwardGraphs, batch: ForwardBatch) -> Tensor:
        for buffer in graphs._hand_over.buffers:
            buffer.fill_(torch.nan)
        for graph in graphs._graphs.values():
            graph.table.values.fill_(NO_SUCH_ID)
        seen.append(batch)
        return real(graphs, batch)

    monkeypatch.setattr(ForwardGraphs, "run", run)
    return seen


def asked(num: int, **sampling: Any) -> list[AdmitRequest]:
    return [
        request(f"r{n}", STEM[n : 3 * n + 6], seed=n, max_tokens=5 + 2 * n, **sampling)
        for n in range(num)
    ]


def test_token_counts_waste_at_most_an_eighth_of_a_forward_that_computes() -> None:
    assert token_counts(0) == ()
    assert token_counts(1) == (1,)
    assert token_counts(70) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 70)
    counts = token_counts(2048)
    assert counts[-1] == 2048
    pairs = [pair for pair in itertools.pairwise(counts) if pair[0] >= FINE_FROM]
    assert max(high / low for low, high in pairs) == 1.125


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("id_window", [1, 3])
def test_prompts_chunks_and_mixed_steps_run_in_pieces_and_give_the_same_tokens(
    window: int | None, id_window: int, ran: list[str], poisoned: list[ForwardBatch]
) -> None:
    """Prompts of 6 to 14 tokens in chunks of at most 15, beside decodes."""
    model = HashModel(window=window, id_window=id_window)
    options: dict[str, Any] = {"max_batched_tokens": 15, "graph_rows": 2, "piece_tokens": 64}
    requests = asked(5)
    executor = captured(make_executor(model, device=GraphDevice(), **options))
    assert serve(executor, requests).outputs == plain_tokens(requests, model)
    assert any(batch.num_tokens not in token_counts(15) for batch in poisoned)
    assert any(1 < batch.num_rows < batch.num_tokens for batch in poisoned)
    assert set(ran) == {REPLAYED, PIECES}


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"greedy", "noise", "filters", "children"}))
def test_decodes_of_unusual_rows_have_a_replayed_forward_and_give_the_same_tokens(
    kind: str, ran: list[str], poisoned: list[ForwardBatch]
) -> None:
    requests = [*asked(2), request("odd", STEM[7:20], **KINDS[kind])]
    executor = captured(
        make_executor(HashModel(window=6), device=GraphDevice(), graph_rows=4, piece_tokens=64)
    )
    served = serve(executor, requests)
    for each in requests:
        assert (
            served.outputs.get((each.request_id, 0), [])
            == plain_run(HashModel(window=6), each).tokens
        )
    assert set(ran) <= {REPLAYED, PIECES, FORWARD}
    assert (FORWARD in ran) == (kind != "embedding")
    assert poisoned


def test_nothing_of_a_step_is_read_by_the_next_one_on_cuda(
    ran: list[str],
) -> None:
    """Where the runtime says what would be a race, steps run ahead of their results."""
    cuda = FakeCuda(seed=3)
    requests = asked(4, repetition_penalty=1.3, logprobs=1)
    executor = captured(
        executor_on(cuda, graph_rows=2, piece_tokens=16, max_batched_tokens=16, depth=3, lead=3)
    )
    assert serve(executor, requests).outputs == plain_tokens(requests)
    cuda.assert_sound()
    assert {PIECES, FORWARD} == set(ran)


def test_a_forward_that_has_no_graph_yet_runs_eagerly_and_is_captured_when_idle(
    ran: list[str],
) -> None:
    device = GraphDevice()
    executor = make_executor(HashModel(), device=device, graph_rows=1, piece_tokens=16)
    [asked_for] = asked(1)
    assert serve(executor, [asked_for]).outputs == plain_tokens([asked_for])
    assert ran[0] == EAGER


def test_forwards_above_the_largest_count_run_eagerly(ran: list[str]) -> None:
    [asked_for] = asked(1)
    device = GraphDevice()
    executor = captured(make_executor(HashModel(), device=device, graph_rows=1, piece_tokens=5))
    assert serve(executor, [asked_for]).outputs == plain_tokens([asked_for])
    assert ran == [EAGER, *[REPLAYED] * 4]


def test_pieces_that_cannot_be_captured_leave_larger_forwards_eager_and_say_why(
    ran: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Whole steps are captured first: 3 of one row; then pieces of 8 tokens, 6, 4, ..."""
    device = GraphDevice(failing_captures={4})
    executor = make_executor(HashModel(), device=device, graph_rows=1, piece_tokens=8)
    with caplog.at_level(logging.WARNING, logger="aserve.gpu.cudagraph.forwards"):
        captured(executor)
    requests = [request("long", STEM[:8], max_tokens=1), request("short", STEM[1:6], max_tokens=1)]
    assert serve(executor, requests, launches_ahead=True).outputs == plain_tokens(requests)
    [record] = [each for each in caplog.records if each.name == "aserve.gpu.cudagraph.forwards"]
    assert "forwards of tokens=8 or more run without graphs (kind=pieces)" in record.getMessage()
    assert "as the test wants it" in record.getMessage()
    assert EAGER in ran


def test_prompts_of_a_model_of_latents_run_eagerly_and_its_decodes_in_one_graph(
    ran: list[str],
) -> None:
    model = HashModel(is_latent=True)
    device = GraphDevice()
    executor = captured(
        make_executor(model, device=device, graph_rows=2, piece_tokens=64, attention="torch-ref")
    )
    requests = asked(1, logprobs=1)
    assert serve(executor, requests).outputs == plain_tokens(requests, model)
    assert ran == [EAGER, *[FORWARD] * (len(ran) - 1)]
    assert "no pieces" in executor.about


def test_results_say_how_their_step_ran() -> None:
    from tests.gpu.drive import _Drive

    kinds: list[str] = []
    real: Callable[..., Any] = _Drive._next_event

    async def noted(drive: _Drive) -> Any:
        event = await real(drive)
        if msgspec.structs.asdict(event).get("ran") if event is not None else None:
            kinds.append(event.ran)
        return event

    executor = captured(
        make_executor(HashModel(), device=GraphDevice(), graph_rows=1, piece_tokens=16)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Drive, "_next_event", noted)
        serve(executor, [request("r", STEM[:6], max_tokens=3)])
    assert kinds == [PIECES, REPLAYED, REPLAYED]


def decoder_executor(**options: Any) -> TorchExecutor:
    model = load_model(MODEL_DIR, dtype="float64", max_model_len=64)
    sizes: dict[str, Any] = {"max_rows": 3, "max_batched_tokens": 9, "attention": "torch-ref"}
    return make_executor(model, device=GraphDevice(), **sizes, **options)


def test_a_decoder_gives_the_same_tokens_in_pieces(ran: list[str]) -> None:
    """With rope and head norms; prompts of 5 to 13 tokens in chunks of at most 9."""
    requests = [
        request(f"r{n}", [7 * i * i + n for i in range(5 + 4 * n)], logprobs=n % 2, max_tokens=6)
        for n in range(3)
    ]
    eager = serve(decoder_executor(graph_rows=0), requests)
    ran.clear()
    replayed = serve(captured(decoder_executor(graph_rows=2, piece_tokens=8)), requests)
    assert replayed.outputs == eager.outputs
    assert {"pieces", "forward"} <= set(ran)
    for key, logprobs in eager.logprobs.items():
        assert replayed.logprobs[key] == pytest.approx(logprobs, abs=1e-9)
