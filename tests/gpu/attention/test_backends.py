"""The backends that gather pages for scaled_dot_product_attention or run Triton's kernels, and the
reference itself, on every kind of step. The kernels have tests of their own, for all lengths."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.attention.sdpa import PagedSdpa
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.kv.layer_groups import AttentionInputs, Mask, group_layers
from aserve.gpu.step.forward_batch import ForwardBatch
from tests.gpu.attention.backend_parity import (
    HEAD_DIM,
    HEADS,
    SHAPES,
    TOLERANCES,
    Layout,
    assert_parity,
    assert_site_parity,
    attended,
    built,
    exact_batch,
    fill,
    latent_layer,
    layer,
    random,
    scattered_site,
)
from tests.gpu.device_tables import device_batch

FLOAT32 = Layout(layer(), dtype=torch.float32)
SCALED = msgspec.structs.replace(layer(window=40), kv_scales=(0.5, 2.0))
OF_TRITON = {
    "a cap": Layout(layer(heads=(6, 1), softcap=2.0), 1, torch.float32),
    "a window of one": Layout(layer(heads=(6, 1), window=1), 24, torch.float32),
    "a window of a page and a cap": Layout(layer(window=16, softcap=2.0), 24, torch.float32),
    "a window of several tiles": Layout(layer(heads=(6, 1), window=290), 1, torch.float32),
    "latents": Layout(latent_layer(), dtype=torch.float32),
    "latents with a cap": Layout(latent_layer(softcap=2.0), 1, torch.bfloat16),
    "latents in eight bits": Layout(latent_layer(), 24, torch.float32, torch.float8_e4m3fn),
    "bfloat16": Layout(layer(), dtype=torch.bfloat16),
    "KV in bfloat16": Layout(SCALED, dtype=torch.float32, kv_dtype=torch.bfloat16),
    "KV in eight bits": Layout(SCALED, dtype=torch.float32, kv_dtype=torch.float8_e4m3fn),
}


@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_the_reference(shape: str, page_size: int) -> None:
    assert_parity("paged-sdpa", Layout(layer(), page_size), shape)


@pytest.mark.parametrize("shape", ["no row", "one decode", "chunk", "verify windows", "mixed"])
def test_every_kind_of_step_in_triton_equals_the_reference(shape: str) -> None:
    assert_parity("triton", FLOAT32, shape)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("window", "softcap"), [(None, 2.0), (1, None), (5, 2.0), (16, None)])
def test_every_kind_of_layer_equals_the_reference(
    window: int | None, softcap: float | None, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    spec = layer(heads=heads, window=window, softcap=softcap)
    for shape in ("mixed", "decodes of all lengths", "no row"):
        assert_parity("paged-sdpa", Layout(spec, dtype=dtype), shape)


@pytest.mark.parametrize("name", ["paged-cpu", "paged-sdpa", "triton"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, 2.0)])
def test_sinks_equal_the_reference(name: str, window: int | None, softcap: float | None) -> None:
    spec = msgspec.structs.replace(layer(window=window, softcap=softcap), has_sinks=True)
    for shape in ("mixed", "long prompts beside a decode and a chunk"):
        assert_parity(name, Layout(spec, dtype=torch.float32), shape)


def test_a_sink_takes_from_all_keys() -> None:
    """The oracle itself: with one key and the score s, the output is the value times the logistic
    function of s - sink."""
    spec = msgspec.structs.replace(layer(heads=(1, 1)), has_sinks=True)
    layout = Layout(spec)
    pools = layout.pools(1)
    pools.page_tables[0][1, 0] = 1
    made = exact_batch(pools, [1], [0])
    q, k, v = random(torch.Generator().manual_seed(5), 3, 1, HEAD_DIM)
    attend = TorchReference(pools).bind(made, None)
    sinks = torch.tensor([0.7], dtype=torch.float64)
    got = attend(spec, AttentionInputs(torch.stack((q, k, v), dim=1), sinks=sinks))
    share = torch.sigmoid((q * k).sum() * spec.scale - sinks)
    torch.testing.assert_close(got[0], share * v)


@pytest.mark.parametrize("shape", ["verify windows", "chunk", "mixed", "a page and one"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (5, 2.0)])
def test_draft_trees_equal_the_reference(
    shape: str, window: int | None, softcap: float | None
) -> None:
    for page_size in (1, 16):
        layout = Layout(layer(window=window, softcap=softcap), page_size)
        assert_parity("paged-sdpa", layout, shape, has_trees=True)


@pytest.mark.parametrize("shape", ["verify windows", "mixed"])
@pytest.mark.parametrize(("window", "page_size"), [(None, 16), (5, 1), (None, 64)])
def test_draft_trees_in_triton_equal_the_reference(
    shape: str, window: int | None, page_size: int
) -> None:
    layout = Layout(layer(window=window), page_size, torch.float32)
    assert_parity("triton", layout, shape, has_trees=True)


@pytest.mark.parametrize("page_size", [1, 16])
def test_draft_trees_over_latents_in_triton_equal_the_reference(page_size: int) -> None:
    layout = Layout(latent_layer(), page_size, torch.float32)
    assert_parity("triton", layout, "chunk", has_trees=True)


@pytest.mark.parametrize(
    ("name", "window"),
    [("paged-cpu", None), ("paged-sdpa", None), ("paged-sdpa", 5), ("triton", None), ("triton", 5)],
)
@pytest.mark.parametrize("shape", ["verify windows", "mixed", "a page and one"])
def test_layers_without_a_causal_mask_equal_the_reference(
    shape: str, name: str, window: int | None
) -> None:
    """A query sees the keys behind it, too, and none beyond its row's length, where NaN is."""
    spec = msgspec.structs.replace(layer(window=window), mask=Mask.NONE)
    assert_parity(name, Layout(spec, dtype=torch.float32), shape)


@pytest.mark.parametrize("name", ["paged-cpu", "paged-sdpa", "triton"])
def test_layers_with_and_without_a_causal_mask_share_a_forward(name: str) -> None:
    """Both are in one layer group, and so have one plan."""
    specs = (layer(), msgspec.structs.replace(layer(), index=1, mask=Mask.NONE))
    site = scattered_site(specs, (2, 4), page_size=16, dtype=torch.float32)
    batch = exact_batch(site.pools, [3, 5], [20, 0])
    assert_site_parity(BACKENDS[name]().build(site), site, batch)


@pytest.mark.parametrize("layout", OF_TRITON.values(), ids=OF_TRITON)
def test_every_kind_of_layer_in_triton_equals_the_reference(layout: Layout) -> None:
    assert_parity("triton", layout, "mixed")


def test_the_reference_is_a_softmax_over_what_a_token_may_see() -> None:
    """The last of 10 tokens sees 4 positions: computed here by hand, for one head."""
    layout = Layout(layer(heads=(1, 1), window=4), page_size=4)
    batch = device_batch([10], [0])
    pools = layout.pools(1)
    fill(pools, layout, batch)
    q, k, v = random(torch.Generator().manual_seed(2), 10, 3, HEAD_DIM).split(1, dim=1)
    made = ForwardBatch.init_new(batch, pools)
    got = attended(TorchReference(pools), layout, made)[9, 0]
    weights = torch.softmax(0.4 * (k[6:, 0] @ q[9, 0]), dim=0)
    torch.testing.assert_close(got, weights @ v[6:, 0])


@pytest.mark.parametrize("name", CpuDevice().attention)
def test_a_row_does_not_see_what_its_table_still_names_behind_the_window(name: str) -> None:
    """Those pages may belong to other rows; here they are NaN."""
    layout = Layout(layer(window=5), page_size=4, dtype=torch.float32)
    batch = device_batch([1, 2], [30, 17])
    pools = layout.pools(2)
    fill(pools, layout, batch)
    made = ForwardBatch.init_new(batch, pools)
    backend = built(name, layout, pools)
    expected = attended(backend, layout, made)
    for row, first_seen in ((1, 26), (2, 13)):
        for page in pools.page_tables[1][row, : first_seen // 4].tolist():
            pools.layers[0].keys[page * 4 : page * 4 + 4] = torch.nan
            pools.layers[0].values[page * 4 : page * 4 + 4] = torch.nan
    assert torch.equal(attended(backend, layout, made), expected)


def test_a_bound_above_the_length_changes_nothing() -> None:
    """In a verify step the host knows only a bound; slots beyond the real length are masked."""
    layout = Layout(layer(), page_size=4)
    batch = device_batch([1, 3], [9, 4])
    pools = layout.pools(2)
    fill(pools, layout, batch)
    made = ForwardBatch.init_new(batch, pools)
    expected = attended(PagedSdpa(pools, group_layers((layout.layer,))), layout, made)
    made.len_bounds_cpu[:] = np.array([17, 29])
    torch.testing.assert_close(
        attended(PagedSdpa(pools, group_layers((layout.layer,))), layout, made), expected
    )


def test_padding_rows_and_later_lengths_need_no_other_plan() -> None:
    """The plan of a captured forward holds for every step of its shape, because lengths, pages and
    slots are read on the device."""
    pools = FLOAT32.pools(3)
    later = device_batch([1, 1, 1], [9, 70, 40])
    fill(pools, FLOAT32, later)
    backend = built("triton", FLOAT32, pools)
    captured = ForwardBatch.init_new(device_batch([1, 1], [0, 0]), pools).padded(4)
    step = ForwardBatch.init_new(later, pools).padded(4)
    got = attended(backend, FLOAT32, step, backend.plan(captured))
    assert torch.equal(got, attended(backend, FLOAT32, step))
    alone = attended(backend, FLOAT32, ForwardBatch.init_new(later, pools))
    assert torch.equal(got[:3], alone)


def test_a_query_of_any_strides_is_read_as_it_is() -> None:
    pools = FLOAT32.pools(1)
    batch = ForwardBatch.init_new(device_batch([3], [0]), pools)
    backend = built("triton", FLOAT32, pools)
    heads = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    attend = backend.bind(batch, backend.plan(batch))
    expected = attend(FLOAT32.layer, AttentionInputs(heads))
    apart = heads.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(FLOAT32.layer, AttentionInputs(apart)), expected)
