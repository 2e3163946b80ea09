"""The real FlashInfer against the reference on CUDA. The same tests run on the CPU over the fake
package, so that the test code itself is known to work."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionBackend, AttentionSite, StaticShape
from aserve.gpu.attention.flashinfer import cascade, wrappers
from aserve.gpu.attention.flashinfer.backend import FlashInfer, build_flashinfer
from aserve.gpu.attention.flashinfer.wrappers import FlashInferPackage
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.device.cuda.device import open_cuda
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.executor import GroupSpec
from tests.fakes.flashinfer import LISTED_IN_TORCH, FakeFlashInfer
from tests.gpu.attention.backend_parity import SHAPES
from tests.gpu.device_tables import device_batch
from tools.gpu_check.recorded_graphs import RecordingCpu

MAX_LEN = 400
MAX_ROWS = max(len(query_lens) for query_lens, _ in SHAPES.values())
HALVES = [torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Kind:
    """A model's layers, one per entry of `windows`, with scales for KV in fp8."""

    head_dim: int
    dtype: torch.dtype
    windows: tuple[int | None, ...] = (None, 37)
    softcap: float | None = None
    kv_dtype: torch.dtype | None = None

    def layers(self) -> tuple[LayerSpec, ...]:
        """Grouped queries."""
        size, cap = self.head_dim, self.softcap
        return tuple(
            LayerSpec(i, 16, 4, size, size**-0.5, window, cap, kv_scales=(0.5, 0.25))
            for i, window in enumerate(self.windows)
        )


# Each window, cap and dtype is a program that is compiled for a minute: on CUDA what engines have
# mostly, and one of everything else.
CUDA_KINDS = {
    "bfloat16": Kind(128, torch.bfloat16, (None,)),
    "KV of eight bits": Kind(128, torch.bfloat16, (None,), kv_dtype=torch.float8_e4m3fn),
    "window and cap": Kind(64, torch.float16, (37,), softcap=20.0),
}
COMPILING = (pytest.mark.gpu, pytest.mark.timeout(450))
CASES = [
    *(
        pytest.param("cpu", Kind(64, dtype, softcap=cap, kv_dtype=kv_dtype), id=f"cpu-{number}")
        for number, (dtype, cap, kv_dtype) in enumerate(
            itertools.product(HALVES, (None, 20.0), (None, torch.float8_e4m3fn))
        )
    ),
    *(
        pytest.param("cuda", kind, id=f"cuda-{name}", marks=COMPILING)
        for name, kind in CUDA_KINDS.items()
    ),
]


def make_pools(
    specs: tuple[LayerSpec, ...], page_size: int, *, dtype: torch.dtype, where: torch.device
) -> KvPools:
    """Gives every row all pages that it may need, scattered, with random KV."""
    groups = group_layers(specs)
    columns = MAX_LEN // page_size + 1
    pools = KvPools(
        groups,
        tuple(GroupSpec(group.name, columns * MAX_ROWS + 1, group.window) for group in groups),
        page_size=page_size,
        table_shape=(MAX_ROWS + 1, columns),
        dtype=dtype,
        device=where,
    )
    generator = torch.Generator().manual_seed(0)
    for kv in pools.layers.values():
        for pool in (kv.keys, kv.values):
            pool.copy_(torch.randn(pool.shape, generator=generator).to(where, dtype))
    for table in pools.page_tables:
        pages = 1 + torch.randperm(columns * MAX_ROWS, generator=generator)
        table[1:] = pages.view(MAX_ROWS, columns).to(where)
    return pools


@pytest.mark.parametrize("page_size", [16, 1, 64])
@pytest.mark.parametrize(("place", "kind"), CASES)
def test_every_shape_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, place: str, kind: Kind, page_size: int
) -> None:
    device = RecordingCpu() if place == "cpu" else open_cuda("a test asks for it")
    specs, dtype = kind.layers(), kind.dtype
    pools = make_pools(specs, page_size, dtype=kind.kv_dtype or dtype, where=device.torch_device)
    site = AttentionSite(pools, group_layers(specs), dtype, device)
    backend: AttentionBackend
    if place == "cpu":
        monkeypatch.setattr(wrappers, "FLOAT_BYTES", 16)
        backend = FlashInfer(FakeFlashInfer(), site, ops=LISTED_IN_TORCH)
    else:
        assert not [*BACKENDS["flashinfer"]().capabilities.refusals(site)]
        backend = BACKENDS["flashinfer"]().build(site)
    shapes = SHAPES.values() if place == "cuda" else [SHAPES["mixed"], SHAPES["one decode"]]
    with device.stream():
        for query_lens, kv_lens in shapes:
            batch = device_batch(query_lens, kv_lens, device=device.torch_device)
            made = ForwardBatch.init_new(dataclasses.replace(batch, is_exact=True), pools)
            assert_parity(backend, TorchReference(pools), made, specs, dtype=dtype)


@pytest.mark.parametrize("page_size", [16, 1, 64])
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *(("cpu", Kind(64, dtype, softcap=cap)) for dtype in HALVES for cap in (None, 20.0)),
        pytest.param("cuda", CUDA_KINDS["bfloat16"], marks=COMPILING),
    ],
)
def test_rows_that_share_their_first_pages_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, place: str, kind: Kind, page_size: int
) -> None:
    monkeypatch.setattr(cascade, "MIN_SAVED_BYTES", 1)
    device = RecordingCpu() if place == "cpu" else open_cuda("a test asks for it")
    specs, dtype = kind.layers(), kind.dtype
    pools = make_pools(specs, page_size, dtype=dtype, where=device.torch_device)
    num_shared = 128 // page_size
    for table in pools.page_tables:
        table[2:, :num_shared] = table[1, :num_shared].clone()
    site = AttentionSite(pools, group_layers(specs), dtype, device)
    if place == "cpu":
        monkeypatch.setattr(wrappers, "FLOAT_BYTES", 16)
        backend = FlashInfer(FakeFlashInfer(), site, ops=LISTED_IN_TORCH)
    else:
        package = cast(FlashInferPackage, importlib.import_module("flashinfer"))
        backend = build_flashinfer(package, site)
    assert backend.static_plans.is_better_eager(2, num_shared)
    with device.stream():
        for query_lens, kv_lens in ([1] * 4, [128, 150, 192, 390]), ([1, 60, 7], [300, 128, 130]):
            batch = device_batch(query_lens, kv_lens, device=device.torch_device)
            batch = dataclasses.replace(batch, is_exact=True, shared_pages=num_shared)
            made = ForwardBatch.init_new(batch, pools)
            assert_parity(backend, TorchReference(pools), made, specs, dtype=dtype)


@pytest.mark.parametrize("page_size", [16, 1, 64])
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        pytest.param("cpu", CUDA_KINDS["window and cap"], id="cpu"),
        *(
            pytest.param("cuda", kind, id=f"cuda-{name}", marks=COMPILING)
            for name, kind in CUDA_KINDS.items()
        ),
    ],
)
def test_captured_decodes_are_planned_in_one_call_and_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    kind: Kind,
    page_size: int,
) -> None:
    """Lengths are on both sides of a page's edge, and long enough for rows to be split."""
    device = RecordingCpu() if place == "cpu" else open_cuda("a test asks for it")
    specs, dtype = kind.layers(), kind.dtype
    pools = make_pools(specs, page_size, dtype=kind.kv_dtype or dtype, where=device.torch_device)
    site = AttentionSite(pools, group_layers(specs), dtype, device)
    if place == "cpu":
        monkeypatch.setattr(wrappers, "FLOAT_BYTES", 16)
        backend = FlashInfer(FakeFlashInfer(), site, ops=LISTED_IN_TORCH)
    else:
        package = cast(FlashInferPackage, importlib.import_module("flashinfer"))
        backend = build_flashinfer(package, site)
    captured = dataclasses.replace(
        device_batch([1] * MAX_ROWS, [0] * MAX_ROWS, device=device.torch_device),
        len_bounds_cpu=np.full(MAX_ROWS, MAX_LEN, np.int32),
    )
    (spec,) = specs
    generator = torch.Generator().manual_seed(1)
    sizes = (MAX_ROWS, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    heads = torch.randn(sizes, generator=generator).to(device.torch_device, dtype)

    def attend(by: AttentionBackend, plan: object) -> Tensor:
        return by.bind(ForwardBatch.init_new(captured, pools), plan)(spec, AttentionInputs(heads))

    with torch.inference_mode(), device.stream():
        plan = backend.static_plans.make(StaticShape(MAX_ROWS, 1, MAX_LEN))
        graph = device.capture(lambda _cut: attend(backend, plan))
        for lens in ([1] * MAX_ROWS, [15, 16, 17, 64, 65, MAX_LEN], [MAX_LEN] * MAX_ROWS):
            kv_lens = np.resize(np.array(lens, np.int32), MAX_ROWS)
            captured.kv_lens.copy_(torch.from_numpy(kv_lens.astype(np.int64) - 1))
            backend.static_plans.refresh(plan, kv_lens)
            got = graph.replay(lambda _values: None).clone()
            expected = attend(TorchReference(pools), None)
            torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)
    assert "one call" not in caplog.text


def assert_parity(
    backend: AttentionBackend,
    reference: AttentionBackend,
    batch: ForwardBatch,
    specs: tuple[LayerSpec, ...],
    *,
    dtype: torch.dtype,
) -> None:
    ours = backend.bind(batch, backend.plan(batch))
    theirs = reference.bind(batch, reference.plan(batch))
    generator = torch.Generator().manual_seed(1)
    for spec in specs:
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        heads = torch.randn((batch.num_tokens, num_heads, spec.head_dim), generator=generator)
        heads = heads.to(batch.rows.device, dtype)
        got, expected = ours(spec, AttentionInputs(heads)), theirs(spec, AttentionInputs(heads))
        torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)
