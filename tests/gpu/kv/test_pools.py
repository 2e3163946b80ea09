"""The KV pools of models with windows in all layers, in some, or in none."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.kv.layer_groups import LayerSpec
from tests.gpu.device_tables import make_pools

PAGE_SIZE = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("windows", [(None, None), (8, None), (8, 8)])
def test_a_cleared_page_is_empty_in_every_layer_of_its_group_and_nowhere_else(
    windows: tuple[int | None, ...], dtype: torch.dtype
) -> None:
    layers = tuple(
        LayerSpec(index, num_heads=2, num_kv_heads=1, head_dim=2, scale=1.0, window=window)
        for index, window in enumerate(windows)
    )
    pools = make_pools(layers, 5, table_shape=(2, 3), page_size=PAGE_SIZE, dtype=dtype)
    for kv in pools.layers.values():
        kv.keys.fill_(torch.nan)
        kv.values.fill_(torch.nan)
    for number in range(len(pools.page_tables)):
        pools.clear(number, torch.tensor([1, 3]))
    for kv in pools.layers.values():
        for pool in (kv.keys, kv.values):
            empty = (pool.float() == 0).all(dim=(1, 2)).view(-1, PAGE_SIZE)
            assert empty.all(dim=1).tolist() == [False, True, False, True, False]
            assert empty.any(dim=1).tolist() == [False, True, False, True, False]
