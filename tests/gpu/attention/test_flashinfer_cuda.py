"""FlashInfer itself against the reference, where there is CUDA and the package."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aserve.gpu.attention.capabilities import AttentionSite
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.attention.torch_ref import TorchReference
from aserve.gpu.device.cuda import open_cuda
from aserve.gpu.forward_batch import ForwardBatch
from aserve.gpu.kv.layer_groups import group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.layer_spec import LayerSpec
from aserve.messages import GroupSpec
from tests.gpu.attention.backend_parity import SHAPES
from tests.gpu.device_tables import device_batch

pytestmark = pytest.mark.gpu

MAX_LEN = 400


def layers(head_dim: int, *, softcap: float | None) -> tuple[LayerSpec, ...]:
    """One that sees all, one with a window; grouped queries."""
    return tuple(
        LayerSpec(i, 16, 4, head_dim, head_dim**-0.5, window, softcap)
        for i, window in enumerate((None, 37))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_shape_equals_the_reference(
    head_dim: int, page_size: int, softcap: float | None, dtype: torch.dtype
) -> None:
    device = open_cuda("a test asks for it")
    where = device.torch_device
    specs = layers(head_dim, softcap=softcap)
    max_rows = max(len(spans) for spans, _ in SHAPES.values())
    columns = MAX_LEN // page_size + 1
    groups = group_layers(specs)
    pools = KvPools(
        groups,
        tuple(GroupSpec(group.name, columns * max_rows + 1, group.window) for group in groups),
        page_size=page_size,
        table_shape=(max_rows + 1, columns),
        dtype=dtype,
        device=where,
    )
    generator = torch.Generator(device=where).manual_seed(0)
    for kv in pools.layers.values():
        kv.keys.normal_(generator=generator)
        kv.values.normal_(generator=generator)
    for table in pools.page_tables:
        pages = 1 + torch.randperm(columns * max_rows, generator=generator, device=where)
        table[1:] = pages.view(max_rows, columns)
    site = AttentionSite(pools, groups, dtype, device)
    backend, reference = BACKENDS["flashinfer"]().build(site), TorchReference(pools)
    for spans, kv_lens in SHAPES.values():
        batch = device_batch(spans, kv_lens, device=where)
        made = ForwardBatch.init_new(dataclasses.replace(batch, is_exact=True), pools)
        got, expected = backend.bind(made, backend.plan(made)), reference.bind(made, None)
        for spec in specs:
            heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
            size = (made.num_tokens, sum(heads), head_dim)
            qkv = torch.randn(size, generator=generator, device=where, dtype=torch.float32)
            q, k, v = qkv.to(dtype).split(heads, dim=1)
            torch.testing.assert_close(
                got(spec, q, k, v), expected(spec, q, k, v), rtol=2e-2, atol=2e-2
            )
