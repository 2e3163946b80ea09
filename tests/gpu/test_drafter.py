"""Drafts, also of a second model with KV pools of its own over the same page tables, and published
lengths for attention that plans on the host.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aserve.errors import ConfigError
from aserve.gpu.attention import registry
from aserve.gpu.attention.base import AttentionKind, AttentionSite, Capabilities
from aserve.gpu.attention.sdpa import PagedSdpa
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.standalone import Standalone
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import array_i32
from tests.fakes.draft_models import OneLayerDraft, ShallowTarget
from tests.fakes.drafters import Stumbling, speculative
from tests.fakes.gated_model import TIMEOUT_S
from tests.fakes.hash_model import HEAD_DIM, VOCAB, FlakyModel, HashModel
from tests.fakes.late_device import LateDevice
from tests.gpu.batch_builder import running, tokens_of
from tests.gpu.drive import Served, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens

PROMPT = [(5 * i * i + 3 * i) % VOCAB for i in range(15)]
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 5}
ASKED = [
    request("greedy", PROMPT[:9], max_tokens=24),
    request("warm", PROMPT, max_tokens=17, **WARM),
    request("short", PROMPT[3:6], max_tokens=20, **WARM),
]


def with_drafter(**options: Any) -> tuple[TorchExecutor, OneLayerDraft]:
    drafter = OneLayerDraft()
    executor = make_executor(
        ShallowTarget(), mode=Speculative(Standalone(drafter, 1)), drafter=drafter, **options
    )
    return executor, drafter


def test_a_draft_of_one_layer_guesses_every_token_from_its_own_kv() -> None:
    executor, _ = with_drafter(depth=2, lead=2)
    served = serve(executor, ASKED, chaos=2)
    assert served.outputs == plain_tokens(ASKED, ShallowTarget())


def num_drafts(served: Served) -> int:
    return sum(int(array_i32(b.verify.num_drafts).sum()) for b in served.batches if b.verify)


@pytest.mark.parametrize("drafts_are_right", [True, False])
def test_a_draft_saves_a_step_where_it_is_right(drafts_are_right: bool) -> None:
    """All drafts of the second model are right, and some of those that are wrong on purpose."""
    if drafts_are_right:
        executor, _ = with_drafter(depth=1, lead=1)
    else:
        executor = make_executor(
            ShallowTarget(), mode=speculative(Stumbling(1, every=2)), depth=1, lead=1
        )
    served = serve(executor, ASKED[:1])
    assert served.outputs == plain_tokens(ASKED[:1], ShallowTarget())
    num_accepted = 24 - 1 - len(served.batches[1:])  # a decode gives one more than it accepts
    assert 0 < num_accepted <= num_drafts(served)
    assert (num_accepted == num_drafts(served)) == drafts_are_right


def test_b04_b19_the_drafters_kv_survives_a_small_pool_and_chunks() -> None:
    """Rows are retracted; in the end every page is free (drive.py)."""
    executor, _ = with_drafter(num_pages=13, max_batched_tokens=5)
    served = serve(executor, ASKED)
    assert served.outputs == plain_tokens(ASKED, ShallowTarget())
    assert served.num_retracted > 0


class FixedKv(CpuDevice):
    """The CPU with 40,000 bytes for KV."""

    def kv_bytes(self, run_largest: Callable[[], None], *, share: float) -> int:
        run_largest()
        return 40_000


def test_kv_memory_is_shared_between_the_model_and_its_drafter() -> None:
    options: dict[str, Any] = {"num_pages": None, "device": FixedKv()}
    alone = make_executor(ShallowTarget(), **options)
    beside, _ = with_drafter(**options)
    per_token = 2 * HEAD_DIM * 8  # keys and values of one layer in float64
    own, draft = 2 * per_token + 4, per_token
    page_size = alone.spec.page_size
    assert alone.spec.groups[0].num_pages == 40_000 // (page_size * own)
    assert beside.spec.groups[0].num_pages == 40_000 // (page_size * (own + draft))


def test_a_drafter_with_windows_that_the_model_has_not_is_refused() -> None:
    drafter = OneLayerDraft()
    drafter.layers = HashModel(window=3).layers[1:]
    with pytest.raises(ConfigError, match="windows"):
        make_executor(ShallowTarget(), mode=Speculative(Standalone(drafter, 1)), drafter=drafter)


class HostLens:
    """Attention that plans from exact lengths on the host, and compares them with the device's."""

    static_plans = None

    def __init__(self, site: AttentionSite) -> None:
        self._sdpa = PagedSdpa(site.pools, site.groups)
        self.bind = self._sdpa.bind
        self.num_plans = 0
        self.num_inexact = 0

    def plan(self, batch: ForwardBatch) -> object:
        is_exact = batch.lens_cpu is not None and batch.lens_cpu.tolist() == batch.lens.tolist()
        self.num_inexact += not is_exact
        self.num_plans += 1
        return self._sdpa.plan(batch)


def register(monkeypatch: pytest.MonkeyPatch) -> list[HostLens]:
    made: list[HostLens] = []

    def build(site: AttentionSite) -> HostLens:
        made.append(HostLens(site))
        return made[-1]

    kind = AttentionKind(Capabilities(host_lens=True), build)
    known = {**registry.BACKENDS, "host-lens": lambda: kind}
    monkeypatch.setattr(registry, "BACKENDS", known)
    return made


@pytest.mark.parametrize("is_late", [False, True])
def test_attention_that_plans_on_the_host_gets_published_lengths(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """Where the device runs behind, two threads read the published lengths."""
    made = register(monkeypatch)
    device = LateDevice() if is_late else CpuDevice()
    if isinstance(device, LateDevice):
        device.is_done.set()
    executor, _ = with_drafter(attention="host-lens", device=device)
    served = serve(executor, ASKED)
    assert served.outputs == plain_tokens(ASKED, ShallowTarget())
    assert any(any(batch.bounds) for batch in served.batches)
    assert made[-1].num_plans == len(served.batches)
    assert made[-1].num_inexact == 0


def test_published_lengths_of_before_a_failed_step_are_not_used_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = register(monkeypatch)
    model, drafter = FlakyModel({5, 11}), OneLayerDraft()
    mode = Speculative(Standalone(drafter, 1))
    executor = make_executor(model, mode=mode, drafter=drafter, attention="host-lens")
    served = serve(executor, ASKED)
    assert served.outputs == plain_tokens(ASKED)
    assert served.num_resyncs > 0
    assert made[-1].num_inexact == 0


def test_attention_has_a_plan_for_each_forward_of_each_step_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sites: list[AttentionSite] = []

    def build(site: AttentionSite) -> PagedSdpa:
        sites.append(site)
        return PagedSdpa(site.pools, site.groups)

    kind = AttentionKind(Capabilities(), build)
    monkeypatch.setattr(registry, "BACKENDS", {"noting": lambda: kind})
    make_executor(
        HashModel(), mode=speculative(Stumbling(1, every=2)), attention="noting", depth=3, lead=3
    )
    assert sites[-1].num_plans == (3 + 1) * 2


async def test_published_lengths_arrive_before_the_draft_is_made() -> None:
    """The mode waits for the test before it drafts; the test goes on when it has the lengths."""
    may_draft = threading.Event()

    def wait() -> None:
        assert may_draft.wait(TIMEOUT_S)

    executor = make_executor(HashModel(), mode=speculative(Stumbling(1, before_extend=wait)))
    async with running(executor) as builder:
        try:
            ticket = executor.launch(builder.batch({1: PROMPT}, sampling=[1]))
            lens = await asyncio.wait_for(ticket.seq_lens, TIMEOUT_S)
            assert not may_draft.is_set()
            assert (array_i32(lens.rows).tolist(), array_i32(lens.lens).tolist()) == ([1], [15])
        finally:
            may_draft.set()
        assert len(tokens_of(await asyncio.wait_for(ticket.outcome, TIMEOUT_S))) == 1
