"""The CPU's own backend, on whatever shapes a step can have."""

from __future__ import annotations

import pytest
import torch

from aserve.errors import BugError
from aserve.gpu.attention.paged_cpu import PagedCpu
from aserve.gpu.forward_batch import ForwardBatch
from aserve.gpu.layers.rotary import Turn
from aserve_kernels.cpu import paged_attention
from tests.gpu.attention.backend_parity import (
    HEADS,
    SHAPES,
    Layout,
    assert_parity,
    attended,
    fill,
    layer,
)
from tests.gpu.device_tables import device_batch

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_the_reference(shape: str, page_size: int, dtype: torch.dtype) -> None:
    assert_parity("paged-cpu", Layout(layer(), page_size, dtype), shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [*HEADS, (40, 2)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 290])
def test_every_kind_of_layer_equals_the_reference(
    window: int | None, softcap: float | None, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    spec = layer(heads=heads, window=window, softcap=softcap)
    for shape in ("mixed", "decodes of all lengths", "long prompts beside a decode and a chunk"):
        assert_parity("paged-cpu", Layout(spec, dtype=dtype), shape)


def test_no_shape_compiles_anything_after_the_start() -> None:
    layout = Layout(layer(), dtype=torch.float32)
    pools = layout.pools(3)
    backend = PagedCpu(pools)
    kernels = paged_attention._attend, paged_attention._attend_alone
    before = [list(kernel.signatures) for kernel in kernels]
    batch = device_batch([1, 7, 1], [9, 0, 40])
    fill(pools, layout, batch)
    made = ForwardBatch.init_new(batch, pools)
    attended(backend, layout, made)  # q is a view of the joined projection
    heads, turn = torch.zeros(made.num_tokens, 8, 8), Turn(torch.zeros(made.num_tokens, 8))
    backend.bind(made, backend.plan(made))(layout.layer, heads, turn)
    assert [list(kernel.signatures) for kernel in kernels] == before


def test_a_plan_of_another_backend_is_refused() -> None:
    pools = Layout(layer(), dtype=torch.float32).pools(1)
    made = ForwardBatch.init_new(device_batch([1], [0]), pools)
    with pytest.raises(BugError, match="plan of another backend"):
        PagedCpu(pools).bind(made, None)
