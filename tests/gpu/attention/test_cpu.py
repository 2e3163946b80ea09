"""The compiled CPU backend against the reference, on all shapes that a step can have."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from aserve.gpu.attention.chunked_prefill import SDPA_TILES, choose_chunked_prefill, compiled_chunks
from aserve.gpu.attention.cpu import PagedCpu
from aserve.gpu.device.cpu.isa import has_chunk_attention, read_isa
from aserve.gpu.kv.layer_groups import AttentionInputs
from aserve.gpu.layers.rope import RopeInputs
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.cpu import chunk_attention, paged_attention
from tests.gpu.attention.backend_parity import (
    HEADS,
    SHAPES,
    Layout,
    assert_attends,
    assert_parity,
    attended,
    fill,
    latent_layer,
    layer,
)
from tests.gpu.device_tables import device_batch

DTYPES = (torch.float32, torch.bfloat16)
LONG = "long prompts beside a decode and a chunk"
SDPA_SOON = dataclasses.replace(SDPA_TILES, min_queries=3, min_keys=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_the_reference(shape: str, page_size: int, dtype: torch.dtype) -> None:
    assert_parity("paged-cpu", Layout(layer(), page_size, dtype), shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*HEADS, (40, 2)])
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, 2.0), (1, None), (5, 2.0), (16, None), (290, 2.0)]
)
def test_every_kind_of_layer_equals_the_reference(
    window: int | None, softcap: float | None, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    spec = layer(heads=heads, window=window, softcap=softcap)
    for shape in ("mixed", "decodes of all lengths", LONG):
        assert_parity("paged-cpu", Layout(spec, dtype=dtype), shape)


@pytest.mark.parametrize("shape", ["verify windows", "chunk", "mixed", LONG])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (5, 2.0)])
def test_draft_trees_equal_the_reference(
    shape: str, window: int | None, softcap: float | None
) -> None:
    for page_size in (1, 16):
        layout = Layout(layer(window=window, softcap=softcap), page_size, torch.float32)
        assert_parity("paged-cpu", layout, shape, has_trees=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_heads", [2, 16, 21])
@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_latents_equal_the_reference(page_size: int, num_heads: int, dtype: torch.dtype) -> None:
    layout = Layout(latent_layer(num_heads), page_size, dtype)
    for shape in SHAPES:
        assert_parity("paged-cpu", layout, shape, has_trees=shape == "verify windows")
    assert_parity("paged-cpu", Layout(latent_layer(softcap=2.0), dtype=dtype), "mixed")


@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_with_many_queries_may_use_another_kernel(shape: str, page_size: int) -> None:
    """That of torch, or aserve's own."""
    in_torch = Layout(layer(), page_size, torch.float32)
    assert_attends(partial(PagedCpu, prefill=SDPA_SOON), in_torch, shape)
    for dtype in DTYPES:
        own = Layout(layer(head_dim=32), page_size, dtype)
        assert_attends(partial(PagedCpu, prefill=compiled_chunks(dtype, 1)), own, shape)


@pytest.mark.parametrize(("window", "softcap"), [(None, 2.0), (5, None), (290, 2.0), (400, None)])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_windows_and_soft_caps_hold_for_rows_with_many_queries(
    window: int | None, softcap: float | None, num_workers: int
) -> None:
    spec = layer(window=window, softcap=softcap, head_dim=32)
    for dtype, prefill in (
        (torch.float32, SDPA_TILES),
        *((dtype, compiled_chunks(dtype, num_workers)) for dtype in DTYPES),
    ):
        for shape in ("mixed", LONG):
            assert_attends(partial(PagedCpu, prefill=prefill), Layout(spec, dtype=dtype), shape)


def test_rows_with_many_queries_use_a_kernel_of_ours_where_it_is_the_fastest() -> None:
    """If heads fill whole vectors; and matrix instructions for bfloat16 are torch's."""
    isa = read_isa()
    for head_dim, dtype in ((32, torch.float32), (40, torch.float32), (32, torch.bfloat16)):
        pools = Layout(layer(head_dim=head_dim), dtype=dtype).pools(1)
        is_fused = choose_chunked_prefill(pools, pools.dtype, 1) is SDPA_TILES
        assert is_fused == (head_dim == 40 or not has_chunk_attention(dtype, isa))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_shape_compiles_anything_after_the_start(dtype: torch.dtype) -> None:
    layout = Layout(layer(head_dim=32), dtype=dtype)
    pools = layout.pools(3)
    backend = PagedCpu(pools, choose_chunked_prefill(pools, pools.dtype, torch.get_num_threads()))
    ops = (paged_attention, chunk_attention)
    kernels = [kernel for op in ops for kernel in (op._attend, op._attend_alone)]
    before = [list(kernel.signatures) for kernel in kernels]
    batch = device_batch([1, 7, 1], [9, 0, 40])
    fill(pools, layout, batch)
    made = ForwardBatch.init_new(batch, pools)
    attended(backend, layout, made)  # q is a view of the joined projection
    heads = torch.zeros(made.num_tokens, 8, 32, dtype=dtype)
    rope = RopeInputs(torch.zeros(made.num_tokens, 32, dtype=dtype))
    backend.bind(made, backend.plan(made))(layout.layer, AttentionInputs(heads, rope))
    assert [list(kernel.signatures) for kernel in kernels] == before
