"""Two tokens per step over the real scheduler and executor: the same tokens, in fewer steps."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aserve.gpu.step.ticket import Outcome, StepTicket
from aserve.messages.base import array_i32
from aserve.messages.results import StepResult
from tests.fakes.hash_model import VOCAB, FlakyModel, HashModel
from tests.fakes.toy_device import TOY
from tests.fakes.two_token_mode import TwoTokens
from tests.gpu.batch_builder import BatchBuilder
from tests.gpu.drive import Served, make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs

PROMPT = [(7 * i * i + 2 * i) % VOCAB for i in range(15)]
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 5}
PENALISED: dict[str, Any] = {
    **WARM,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.6,
    "repetition_penalty": 1.4,
    "top_k": 12,
}
ASKED = [
    request("greedy", PROMPT[:9], max_tokens=24),
    request("warm", PROMPT, max_tokens=17, **WARM),
    request("penalised", PROMPT[3:], max_tokens=24, **PENALISED),
    request("ends", PROMPT[5:], end_ids=(1, 2, 3, 4, 5), max_tokens=24, min_tokens=3, **WARM),
    request("masked", PROMPT[2:8], max_tokens=9, grammar=TOY, **WARM),
]
EXPECTED = {(asked.request_id, 0): plain_outputs(HashModel(), asked) for asked in ASKED}


def num_drafts(served: Served) -> int:
    return sum(int(array_i32(b.verify.num_drafts).sum()) for b in served.batches if b.verify)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("depth", "lead"), [(1, 1), (2, 2), (3, 3)])
def test_two_tokens_per_step_are_those_of_one_per_step(
    depth: int, lead: int, page_size: int
) -> None:
    pages: dict[str, Any] = {"page_size": page_size, "num_pages": 400 // page_size + 1}
    executor = make_executor(HashModel(), mode=TwoTokens(), depth=depth, lead=lead, **pages)
    served = serve(executor, ASKED, chaos=depth)
    assert served.outputs == EXPECTED
    assert num_drafts(served) > 20


def test_some_drafts_are_accepted_and_some_are_not() -> None:
    alone = [ASKED[0]]
    served = serve(make_executor(HashModel(), mode=TwoTokens(), depth=1, lead=1), alone)
    decodes = served.batches[1:]
    num_accepted = 24 - 1 - len(decodes)  # each decode gives one token more than it accepts
    assert 0 < num_accepted < num_drafts(served)


def test_two_tokens_survive_chunks_tiny_pools_windows_and_failing_steps() -> None:
    model = FlakyModel({5, 11, 30}, window=6)
    plain = HashModel(window=6)
    executor = make_executor(model, mode=TwoTokens(), num_pages=13, max_batched_tokens=5)
    served = serve(executor, ASKED)
    assert served.outputs == {(r.request_id, 0): plain_outputs(plain, r) for r in ASKED}
    assert served.num_retracted > 0
    assert served.num_resyncs > 0


async def test_published_lengths_arrive_before_the_draft_is_made() -> None:
    """The mode waits for the test before it drafts; the test goes on when it has the lengths."""
    may_draft = threading.Event()

    def wait() -> None:
        assert may_draft.wait(timeout=30)

    executor = make_executor(HashModel(), mode=TwoTokens(before_draft=wait))
    executor.start(asyncio.get_running_loop())
    try:
        ticket = executor.launch(BatchBuilder(executor.spec).batch({1: PROMPT}, sampling=[1]))
        lens = await asyncio.wait_for(ticket.seq_lens, timeout=30)
        assert not may_draft.is_set()
        assert (array_i32(lens.rows).tolist(), array_i32(lens.lens).tolist()) == ([1], [15])
        may_draft.set()
        assert isinstance(await asyncio.wait_for(_outcome(ticket), timeout=30), StepResult)
    finally:
        may_draft.set()
        executor.close()


async def _outcome(ticket: StepTicket) -> Outcome:
    return await ticket
