"""The fused steps of speculation against the same steps operator by operator: tokens, counts and
published lengths (which the batches of later steps show), the relay, and the KV of both models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.decode.base import OnPublish
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.spec.fused import FusedSpeculation
from aserve.gpu.spec.registry import BLOCK, COUPLED, REJECTION
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS
from aserve.gpu.step.results import Packed
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.requests import AdmitRequest
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.gpu.drive import Served, request, serve

PROMPT = [1, *((37 * i * i + 11 * i) % 2000 + 20 for i in range(150))]
ASKED = [
    request("greedy", PROMPT[:9], max_tokens=30),
    request("chunked", PROMPT, max_tokens=22, temperature=0.8, seed=7),
    request("hot", PROMPT[3:40], max_tokens=25, temperature=1.5, seed=1 << 63),
    request("short", PROMPT[2:7], max_tokens=3),
    request("picky", PROMPT[:20], max_tokens=6, presence_penalty=0.5, logprobs=2),
    request("edited", PROMPT[:12], max_tokens=40),
]


def run(
    algorithm: str | None,
    asked: list[AdmitRequest] | None = None,
    *,
    verification: str = COUPLED,
    **changes: Any,
) -> tuple[Served, TorchExecutor]:
    speculative = None
    if algorithm is not None:
        speculative = SpecOptions(
            algorithm, bundled_drafters=DRAFTERS_DIR, verification=verification
        )
    options = BuildOptions(
        MODEL_DIR,
        num_pages=2000 // changes.get("page_size", 16),
        max_rows=len(ASKED),
        max_batched_tokens=64,
        speculative=speculative,
        **changes,
    )
    executor = build_executor(options)
    return serve(executor, asked or predicted()), executor


@cache
def plain_outputs() -> dict[tuple[str, int], list[int]]:
    return run(None, ASKED)[0].outputs


def predicted() -> list[AdmitRequest]:
    """The last request predicts its output, with one token changed."""
    text = plain_outputs()[ASKED[-1].request_id, 0]
    text = [*text[:20], text[20] + 1, *text[21:]]
    return [*ASKED[:-1], msgspec.structs.replace(ASKED[-1], prediction_ids=pack_i32(text))]


def shapes(served: Served) -> list[object]:
    return [(b.rows, b.kv_lens, b.bounds, b.query_lens, b.verify) for b in served.batches]


@pytest.mark.parametrize(
    ("algorithm", "pace", "page_size"),
    [
        ("STANDALONE", (1, 1), 16),
        ("STANDALONE", (2, 2), 1),
        ("STANDALONE", (3, 3), 16),
        ("NGRAM", (2, 2), 16),
        ("EAGLE", (2, 2), 1),
        ("EAGLE3", (2, 2), 16),
        ("EAGLE3", (1, 1), 1),
        ("NEXTN", (1, 1), 16),
        ("NEXTN", (3, 3), 1),
        ("FROZEN_KV_MTP", (2, 2), 16),
        ("DFLASH", (2, 2), 1),
        (None, (2, 2), 16),
    ],
)
@torch.inference_mode()
def test_fused_steps_equal_those_of_single_operators(
    algorithm: str | None, pace: tuple[int, int], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_outputs()
    step = Mock(side_effect=partial(step_with_checked_lens, FusedSpeculation.step))
    monkeypatch.setattr(FusedSpeculation, "step", lambda *given: step(*given))
    settings: dict[str, Any] = {"depth": pace[0], "lead": pace[1], "page_size": page_size}
    fused, executor = run(algorithm, **settings)
    assert len(fused.batches) // 2 < step.call_count < len(fused.batches)  # not those with "picky"
    single, other = run(algorithm, debug_checks=True, **settings)
    assert fused.outputs == single.outputs == expected
    assert fused.num_resyncs == 0
    assert shapes(fused) == shapes(single)
    drafts = [array_i32(b.verify.num_drafts) for b in fused.batches if b.verify is not None]
    num_draws = sum(len(array_i32(batch.sample_rows)) for batch in fused.batches)
    num_accepted = sum(map(len, fused.outputs.values())) - num_draws
    assert 0 < num_accepted < sum(d.sum() for d in drafts)
    assert_same_state(executor, other)
    if algorithm == "NGRAM":
        one, two = (shared_table(each) for each in (executor, other))
        assert one.any()
        assert torch.equal(one, two)


WARM = [
    request(f"{number}", PROMPT[number : number + 9], max_tokens=40, temperature=t, seed=number)
    for number, t in enumerate((0.8, 1.5, 0.0, 1.0))
]


@pytest.mark.parametrize(
    ("algorithm", "verification"),
    [
        ("DFLASH", REJECTION),
        ("EAGLE3", BLOCK),
        ("EAGLE3", REJECTION),
        ("FROZEN_KV_MTP", REJECTION),
        ("NEXTN", BLOCK),
        ("STANDALONE", BLOCK),
        ("STANDALONE", REJECTION),
    ],
)
@torch.inference_mode()
def test_fused_steps_verify_random_drafts_as_single_operators_do(
    algorithm: str, verification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, their distributions, coins and residuals: one that differs shows in later tokens."""
    asked = [*WARM, *(each for each in predicted() if each.prediction_ids)]
    step = Mock(side_effect=FusedSpeculation.step)
    monkeypatch.setattr(FusedSpeculation, "step", lambda *given: step(*given))
    settings: dict[str, Any] = {"depth": 2, "lead": 2, "verification": verification}
    fused, executor = run(algorithm, asked, **settings)
    assert step.call_count == len(fused.batches)
    single, other = run(algorithm, asked, debug_checks=True, **settings)
    assert step.call_count == len(fused.batches)
    assert fused.outputs == single.outputs
    assert shapes(fused) == shapes(single)
    assert_same_state(executor, other)
    num_drafts = sum(array_i32(b.verify.num_drafts).sum() for b in fused.batches if b.verify)
    num_draws = sum(len(array_i32(batch.sample_rows)) for batch in fused.batches)
    num_accepted = sum(map(len, fused.outputs.values())) - num_draws
    assert 40 < num_accepted < num_drafts - 40


def shared_table(executor: TorchExecutor) -> torch.Tensor:
    mode: Any = executor._runner._parts.mode
    table: torch.Tensor = mode._windows._drafter._drafter.shared
    return table


def step_with_checked_lens(
    step: Callable[..., Packed], self: FusedSpeculation, plan: StepPlan, publish: OnPublish
) -> Packed:
    """The host is told the lengths that later steps find in the relay."""

    def check(lens: torch.Tensor) -> None:
        relay = self._target._state.relay  # type: ignore[attr-defined]  # of the CPU's
        assert lens.tolist() == relay.table(SEQ_LEN).numpy()[plan.rows].tolist()
        publish(lens)

    return step(self, plan, check)


def assert_same_state(one: TorchExecutor, two: TorchExecutor) -> None:
    here, there = one._runner.state, two._runner.state
    for name in (LAST_TOKEN, SEQ_LEN):
        assert torch.equal(here.relay.table(name)[1:], there.relay.table(name)[1:])
    assert torch.equal(here.relay.written_iter[1:], there.relay.written_iter[1:])
    if DRAFTS in here.relay:  # the first draft of each row in its last step with drafts
        assert torch.equal(*(state.relay.table(DRAFTS)[1:, 0] for state in (here, there)))
    lens = here.relay.table(SEQ_LEN)[1:]
    rows = torch.arange(1, len(lens) + 1).repeat_interleave(lens)
    positions = torch.cat([torch.arange(int(n)) for n in lens])
    pairs = [(here.pools, there.pools)]
    if here.draft_pools is not None and there.draft_pools is not None:
        pairs.append((here.draft_pools, there.draft_pools))
    for pools in pairs:
        slots = pools[0].slots(0, rows, positions)
        for parts in zip(*(kv_at(each, slots) for each in pools), strict=True):
            torch.testing.assert_close(*parts, atol=1e-3, rtol=1e-3)


def kv_at(pools: KvPools, slots: torch.Tensor) -> list[torch.Tensor]:
    return [part[slots] for kv in pools.layers.values() for part in (kv.keys, kv.values)]
