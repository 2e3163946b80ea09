"""The Triton backend in the interpreter against the reference, on all shapes of a step."""

from __future__ import annotations

import msgspec
import pytest
import torch

from aserve.errors import BugError
from aserve.gpu.kv.layer_groups import AttentionInputs
from aserve.gpu.step.forward_batch import ForwardBatch
from tests.gpu.attention.backend_parity import (
    SHAPES,
    Layout,
    assert_parity,
    attended,
    built,
    fill,
    layer,
)
from tests.gpu.device_tables import device_batch


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_the_reference(shape: str) -> None:
    assert_parity("triton", Layout(layer(), dtype=torch.float32), shape)


@pytest.mark.parametrize("page_size", [1, 24])
@pytest.mark.parametrize(("window", "softcap"), [(None, 2.0), (1, None), (16, 2.0), (290, None)])
def test_every_kind_of_layer_equals_the_reference(
    window: int | None, softcap: float | None, page_size: int
) -> None:
    spec = layer(heads=(6, 1), window=window, softcap=softcap)
    assert_parity("triton", Layout(spec, page_size, torch.float32), "mixed")


def test_half_types_equal_the_reference() -> None:
    assert_parity("triton", Layout(layer(), dtype=torch.bfloat16), "mixed")


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_kv_in_another_format_equals_the_reference(kv_dtype: torch.dtype) -> None:
    spec = msgspec.structs.replace(layer(window=40), kv_scales=(0.5, 2.0))
    assert_parity("triton", Layout(spec, dtype=torch.float32, kv_dtype=kv_dtype), "mixed")


def test_padding_rows_and_later_lengths_need_no_other_plan() -> None:
    """The plan of a captured forward holds for every step of its shape, because lengths, pages and
    slots are read on the device."""
    layout = Layout(layer(), dtype=torch.float32)
    pools = layout.pools(3)
    later = device_batch([1, 1, 1], [9, 150, 40])
    fill(pools, layout, later)
    backend = built("triton", layout, pools)
    captured = ForwardBatch.init_new(device_batch([1, 1], [0, 0]), pools).padded(4)
    plan = backend.plan(captured)
    step = ForwardBatch.init_new(later, pools).padded(4)
    got = attended(backend, layout, step, plan)
    assert torch.equal(got, attended(backend, layout, step))
    alone = attended(backend, layout, ForwardBatch.init_new(later, pools))
    assert torch.equal(got[:3], alone)


def test_a_query_of_any_strides_is_read_as_it_is() -> None:
    layout = Layout(layer(), dtype=torch.float32)
    pools = layout.pools(1)
    batch = ForwardBatch.init_new(device_batch([3], [0]), pools)
    backend = built("triton", layout, pools)
    heads = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    attend = backend.bind(batch, backend.plan(batch))
    expected = attend(layout.layer, AttentionInputs(heads))
    apart = heads.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(layout.layer, AttentionInputs(apart)), expected)


def test_a_plan_of_another_backend_is_refused() -> None:
    layout = Layout(layer(), dtype=torch.float32)
    pools = layout.pools(1)
    made = ForwardBatch.init_new(device_batch([1], [0]), pools)
    with pytest.raises(BugError, match="plan of another backend"):
        built("triton", layout, pools).bind(made, None)
