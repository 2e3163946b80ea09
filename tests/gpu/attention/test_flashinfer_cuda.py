"""The real FlashInfer against the reference on CUDA. The same tests run on the CPU over the fake
package, so that the test code itself is known to work."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.base import (
    AttentionBackend,
    AttentionSite,
    AttentionUnavailable,
    StaticShape,
)
from aserve.gpu.attention.flashinfer import cascade
from aserve.gpu.attention.flashinfer.backend import FlashInfer, build_flashinfer
from aserve.gpu.attention.flashinfer.latent_wrapper import OWN_WORKSPACES
from aserve.gpu.attention.flashinfer.wrappers import FlashInferPackage
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.device.base import Device
from aserve.gpu.device.cuda.device import open_cuda
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.step.forward_batch import ForwardBatch
from tests.fakes.flashinfer import LISTED_IN_TORCH, FakeFlashInfer
from tests.gpu.attention.backend_parity import (
    SHAPES,
    assert_site_parity,
    draw_heads,
    exact_batch,
    scattered_site,
)
from tests.gpu.device_tables import device_batch
from tools.gpu_check.recorded_graphs import RecordingCpu

MAX_LEN = 400
MAX_ROWS = max(len(query_lens) for query_lens, _ in SHAPES.values())


@dataclass(frozen=True)
class Kind:
    """A model's layers, one per entry of `windows`, with scales for KV in fp8."""

    head_dim: int
    dtype: torch.dtype
    windows: tuple[int | None, ...]
    softcap: float | None = None
    kv_dtype: torch.dtype | None = None
    value_dim: int | None = None  # of latents
    num_kv_heads: int = 4  # for 16 query heads

    def layers(self) -> tuple[LayerSpec, ...]:
        """Grouped queries, or latents."""
        if self.value_dim is not None:
            return (LayerSpec(0, 16, 1, self.head_dim, 0.1, value_dim=self.value_dim),)
        size, cap = self.head_dim, self.softcap
        return tuple(
            LayerSpec(
                *(i, 16, self.num_kv_heads, size, size**-0.5, window, cap), kv_scales=(0.5, 0.25)
            )
            for i, window in enumerate(self.windows)
        )


# Each window, cap and dtype is a program that is compiled for a minute: on CUDA what engines have
# mostly, and one of everything else.
PLAIN = Kind(128, torch.bfloat16, (None,))
# As Qwen3-0.6B: decodes of 2 query heads per KV head use the kernel without tensor cores.
TWO_PER_KV_HEAD = Kind(128, torch.bfloat16, (None,), num_kv_heads=8)
WINDOW_AND_CAP = Kind(64, torch.float16, (37,), softcap=20.0)
EIGHT_BITS = Kind(128, torch.bfloat16, (None,), kv_dtype=torch.float8_e4m3fn)
LATENTS = Kind(576, torch.bfloat16, (None,), value_dim=512)
COMPILING = (pytest.mark.gpu, pytest.mark.timeout(450))


def cases(on_cpu: Kind, **on_cuda: Kind) -> pytest.MarkDecorator:
    """Parametrizes a test with the place, the kind of layers and the page size."""
    params = [pytest.param("cpu", on_cpu, 16, id="cpu")]
    for name, kind in on_cuda.items():
        for page_size in (16, 1, 64):
            case = pytest.param("cuda", kind, page_size, marks=COMPILING, id=f"{name}-{page_size}")
            params.append(case)
    return pytest.mark.parametrize(("place", "kind", "page_size"), params)


def make_site(
    place: str, kind: Kind, page_size: int, *, num_shared: int = 0
) -> tuple[Device, AttentionSite]:
    device = RecordingCpu() if place == "cpu" else open_cuda("a test asks for it")
    site = scattered_site(
        kind.layers(),
        (MAX_ROWS, MAX_LEN // page_size + 1),
        page_size=page_size,
        dtype=kind.dtype,
        kv_dtype=kind.kv_dtype,
        device=device,
        num_shared=num_shared,
    )
    return device, site


def build(place: str, site: AttentionSite) -> FlashInfer:
    if place == "cpu":
        return FlashInfer(FakeFlashInfer(), site, ops=LISTED_IN_TORCH)
    return build_flashinfer(cast(FlashInferPackage, importlib.import_module("flashinfer")), site)


def refuses_latents(place: str, kind: Kind) -> bool:
    """Whether the installed release of FlashInfer cannot plan for layers of this kind."""
    if place == "cpu" or kind.value_dim is None:
        return False
    return hasattr(importlib.import_module("flashinfer").mla, OWN_WORKSPACES)


@pytest.fixture(autouse=True)
def _workspace(request: pytest.FixtureRequest, place: str) -> None:
    if place == "cpu":
        request.getfixturevalue("small_workspace")


@cases(
    Kind(64, torch.bfloat16, (None, 37), softcap=20.0, kv_dtype=torch.float8_e4m3fn),
    bfloat16=PLAIN,
    two_per_kv_head=TWO_PER_KV_HEAD,
    latents=LATENTS,
    kv_of_eight_bits=EIGHT_BITS,
    window_and_cap=WINDOW_AND_CAP,
)
def test_every_shape_equals_the_reference(place: str, kind: Kind, page_size: int) -> None:
    device, site = make_site(place, kind, page_size)
    if place == "cuda":
        assert not [*BACKENDS["flashinfer"]().capabilities.refusals(site)]
    if refuses_latents(place, kind):
        with pytest.raises(AttentionUnavailable, match="latent"):
            build(place, site)
        return
    backend = build(place, site)
    shapes = SHAPES.values() if place == "cuda" else [SHAPES["mixed"], SHAPES["one decode"]]
    with device.stream():
        for query_lens, kv_lens in shapes:
            assert_site_parity(backend, site, exact_batch(site.pools, query_lens, kv_lens))


@cases(Kind(64, torch.float16, (None, 37), softcap=20.0), bfloat16=PLAIN)
def test_rows_that_share_their_first_pages_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, place: str, kind: Kind, page_size: int
) -> None:
    monkeypatch.setattr(cascade, "MIN_SAVED_BYTES", 1)
    num_shared = 128 // page_size
    device, site = make_site(place, kind, page_size, num_shared=num_shared)
    backend = build(place, site)
    assert backend.static_plans.is_better_eager(2, num_shared)
    with device.stream():
        for query_lens, kv_lens in ([1] * 4, [128, 150, 192, 390]), ([1, 60, 7], [300, 128, 130]):
            batch = exact_batch(site.pools, query_lens, kv_lens, num_shared=num_shared)
            assert_site_parity(backend, site, batch)


@cases(
    WINDOW_AND_CAP,
    bfloat16=PLAIN,
    two_per_kv_head=TWO_PER_KV_HEAD,
    latents=LATENTS,
    kv_of_eight_bits=EIGHT_BITS,
    window_and_cap=WINDOW_AND_CAP,
)
def test_captured_decodes_are_planned_in_one_call_and_equal_the_reference(
    caplog: pytest.LogCaptureFixture, place: str, kind: Kind, page_size: int
) -> None:
    """Lengths are on both sides of a page's edge, and long enough for rows to be split."""
    device, site = make_site(place, kind, page_size)
    if refuses_latents(place, kind):
        with pytest.raises(AttentionUnavailable, match="latent"):
            build(place, site)
        return
    backend, pools = build(place, site), site.pools
    captured = dataclasses.replace(
        device_batch([1] * MAX_ROWS, [0] * MAX_ROWS, device=pools.device),
        len_bounds_cpu=np.full(MAX_ROWS, MAX_LEN, np.int32),
    )
    (spec,) = site.layers
    heads = draw_heads(site, spec, MAX_ROWS)

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
