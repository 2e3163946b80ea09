"""The Triton backend in the interpreter against the reference, on every kind of step. Its kernels
have tests of their own, for all lengths."""

from __future__ import annotations

import msgspec
import pytest
import torch

from aserve.gpu.kv.layer_groups import AttentionInputs
from aserve.gpu.step.forward_batch import ForwardBatch
from tests.gpu.attention.backend_parity import (
    Layout,
    assert_parity,
    attended,
    built,
    fill,
    layer,
)
from tests.gpu.device_tables import device_batch

PLAIN = Layout(layer(), dtype=torch.float32)
SCALED = msgspec.structs.replace(layer(window=40), kv_scales=(0.5, 2.0))
LAYOUTS = {
    "a cap": Layout(layer(heads=(6, 1), softcap=2.0), 1, torch.float32),
    "a window of one": Layout(layer(heads=(6, 1), window=1), 24, torch.float32),
    "a window of a page and a cap": Layout(layer(window=16, softcap=2.0), 24, torch.float32),
    "a window of several tiles": Layout(layer(heads=(6, 1), window=290), 1, torch.float32),
    "bfloat16": Layout(layer(), dtype=torch.bfloat16),
    "KV in bfloat16": Layout(SCALED, dtype=torch.float32, kv_dtype=torch.bfloat16),
    "KV in eight bits": Layout(SCALED, dtype=torch.float32, kv_dtype=torch.float8_e4m3fn),
}


@pytest.mark.parametrize("shape", ["no row", "one decode", "chunk", "verify windows", "mixed"])
def test_every_shape_equals_the_reference(shape: str) -> None:
    assert_parity("triton", PLAIN, shape)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_kind_of_layer_equals_the_reference(layout: Layout) -> None:
    assert_parity("triton", layout, "mixed")


def test_padding_rows_and_later_lengths_need_no_other_plan() -> None:
    """The plan of a captured forward holds for every step of its shape, because lengths, pages and
    slots are read on the device."""
    pools = PLAIN.pools(3)
    later = device_batch([1, 1, 1], [9, 70, 40])
    fill(pools, PLAIN, later)
    backend = built("triton", PLAIN, pools)
    captured = ForwardBatch.init_new(device_batch([1, 1], [0, 0]), pools).padded(4)
    step = ForwardBatch.init_new(later, pools).padded(4)
    got = attended(backend, PLAIN, step, backend.plan(captured))
    assert torch.equal(got, attended(backend, PLAIN, step))
    alone = attended(backend, PLAIN, ForwardBatch.init_new(later, pools))
    assert torch.equal(got[:3], alone)


def test_a_query_of_any_strides_is_read_as_it_is() -> None:
    pools = PLAIN.pools(1)
    batch = ForwardBatch.init_new(device_batch([3], [0]), pools)
    backend = built("triton", PLAIN, pools)
    heads = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    attend = backend.bind(batch, backend.plan(batch))
    expected = attend(PLAIN.layer, AttentionInputs(heads))
    apart = heads.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(PLAIN.layer, AttentionInputs(apart)), expected)
