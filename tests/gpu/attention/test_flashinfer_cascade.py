"""Cascade attention for rows that share their first pages: it equals the reference, it is used only
where it is worthwhile, and an engine gives the same tokens with it."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionSite, Capabilities
from aserve.gpu.attention.flashinfer import cascade
from aserve.gpu.attention.flashinfer.backend import FlashInfer
from aserve.gpu.attention.flashinfer.cascade import MIN_SAVED_BYTES, is_worthwhile
from aserve.gpu.cudagraph.forwards import PIECES, ForwardGraphs
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.halves import cut_in_two
from tests.fakes.flashinfer import LISTED_IN_TORCH, FakeFlashInfer
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import HashModel
from tests.gpu.attention.backend_parity import (
    HEADS,
    assert_site_parity,
    exact_batch,
    layer,
    scattered_site,
)
from tests.gpu.attention.test_flashinfer import register
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs

SHARED_LEN = 32
# (spans, KV lengths before them), of which the first 32 tokens are shared
STEPS = {
    "decodes": ([1] * 4, [32, 33, 47, 60]),
    "chunks": ([7, 20, 16], [32, 40, 48]),
    "mixed": ([1, 9, 1], [50, 32, 33]),
}


@pytest.fixture(autouse=True)
def _always_pays(monkeypatch: pytest.MonkeyPatch, small_workspace: None) -> None:
    monkeypatch.setattr(cascade, "MIN_SAVED_BYTES", 1)


def make_site(
    layers: tuple[LayerSpec, ...], page_size: int, kv_dtype: torch.dtype | None = None
) -> AttentionSite:
    """Four rows, which share the pages of the first 32 tokens."""
    num_shared = SHARED_LEN // page_size
    return scattered_site(
        layers, (4, 70), page_size=page_size, kv_dtype=kv_dtype, num_shared=num_shared
    )


def forward(site: AttentionSite, query_lens: list[int], kv_lens: list[int]) -> ForwardBatch:
    num_shared = SHARED_LEN // site.pools.page_size
    return exact_batch(site.pools, query_lens, kv_lens, num_shared=num_shared)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("page_size", "softcap"), [(1, None), (16, 2.0)])
def test_two_levels_equal_the_reference_beside_layers_with_a_window(
    page_size: int, softcap: float | None, heads: tuple[int, int], step: str
) -> None:
    layers = tuple(
        msgspec.structs.replace(layer(heads=heads, window=window, softcap=softcap), index=i)
        for i, window in enumerate((None, 6, None))
    )
    site = make_site(layers, page_size)
    package = FakeFlashInfer()
    backend = FlashInfer(package, site)
    batch = forward(site, *STEPS[step])
    assert_site_parity(backend, site, batch)
    shared, own, *windowed = package.plans  # both layers without a window have one plan
    assert shared.pages.tolist() == site.pools.page_tables[0][1, : SHARED_LEN // page_size].tolist()
    assert [plan.causal for plan in (shared, own)] == [False, True]
    assert [plan.window_left for plan in windowed] == [5] * (2 if step == "mixed" else 1)


@pytest.mark.parametrize(
    ("window", "dtype"), [(None, torch.float8_e4m3fn), (6, torch.float64)], ids=str
)
def test_kv_in_eight_bits_and_layers_with_windows_alone_are_read_as_without_sharing(
    window: int | None, dtype: torch.dtype
) -> None:
    """KV in fp8 has scales, which cascade attention does not pass."""
    site = make_site((layer(window=window),), 16, dtype)
    package = FakeFlashInfer()
    backend = FlashInfer(package, site)
    assert not backend.static_plans.is_better_eager(4, 2)
    batch = forward(site, *STEPS["decodes"])
    assert_site_parity(backend, site, batch)
    assert len(package.plans) == 1


def test_it_is_worthwhile_from_a_minimum_of_saved_kv_bytes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cascade, "MIN_SAVED_BYTES", MIN_SAVED_BYTES)
    per_token = 4096.0  # 8 KV heads of 128 in 16 bits
    assert is_worthwhile(65, 1024, bytes_per_token=per_token)
    for num_rows, shared_tokens in ((64, 1024), (65, 1023), (1, 1 << 20), (65, 0)):
        assert not is_worthwhile(num_rows, shared_tokens, bytes_per_token=per_token)
    assert not is_worthwhile(65, 1024, bytes_per_token=per_token / 2)


def test_some_of_the_rows_share_as_much_and_padding_nothing() -> None:
    site = make_site((layer(),), 16)
    made = forward(site, *STEPS["decodes"])
    assert made.padded(4).shared_pages == 2
    assert made.padded(5).shared_pages == 0
    assert [part.shared_pages for part in cut_in_two(made)] == [2, 2]


def test_a_decode_with_a_cascade_is_replayed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operator by operator it would take the host longer than a short step takes the device."""
    ran: list[tuple[bool, str]] = []
    run = ForwardGraphs.run

    def noted(graphs: ForwardGraphs, batch: ForwardBatch) -> Tensor:
        hidden = run(graphs, batch)
        ran.append((batch.shared_pages > 0 and batch.num_rows == batch.num_tokens, graphs.ran))
        return hidden

    monkeypatch.setattr(ForwardGraphs, "run", noted)
    capabilities = Capabilities(can_capture=True, shared_pages=True)
    register(monkeypatch, FakeFlashInfer(), ops=LISTED_IN_TORCH, capabilities=capabilities)
    model = HashModel()
    executor = make_executor(
        *(model,),
        attention="flashinfer",
        device=GraphDevice(),
        graph_rows=4,
        piece_tokens=64,
        max_batched_tokens=64,
    )
    asked = [request(f"r{i}", [*range(20), 21 + i], max_tokens=12) for i in range(3)]
    served = serve(captured(executor), asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(model, r) for r in asked}
    assert ran.count((True, PIECES)) > 5
    assert all(how == PIECES for is_cascade, how in ran if is_cascade)


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_engine_gives_the_plain_tokens_and_replays_only_where_nothing_is_shared(
    monkeypatch: pytest.MonkeyPatch, *, is_shared: bool
) -> None:
    package = FakeFlashInfer()
    capabilities = Capabilities(can_capture=True, shared_pages=True)
    register(monkeypatch, package, ops=LISTED_IN_TORCH, capabilities=capabilities)
    model, device = HashModel(window=6), GraphDevice()
    executor = make_executor(
        model, attention="flashinfer", device=device, graph_rows=4, max_batched_tokens=64
    )
    executor.capture_graphs(lambda _done, _total: None)
    del package.plans[:]
    first = [*range(20)]
    starts = [first, first, first] if is_shared else [first, first[1:], first[2:]]
    asked = [request(f"r{i}", [*start, 21 + i], max_tokens=12) for i, start in enumerate(starts)]
    served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(model, r) for r in asked}
    num_cascades = sum(not plan.causal for plan in package.plans)
    assert num_cascades == sum(batch.shared_pages > 0 for batch in served.batches)
    assert (num_cascades > 5) == is_shared
    assert device.num_replays > 5 or is_shared
    assert device.num_replays + num_cascades < len(served.batches)
