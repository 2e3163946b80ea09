"""Keys and values into their pools by one Triton kernel: rounded, scaled and stored in one pass.

It knows no page and no layer. The kernel computes in float32, so what is wider is left to torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.kv.stored import Scales, StoreKv, store_plain
from aserve_kernels.store_kv import store_kv


def triton_store(dtype: torch.dtype) -> StoreKv:
    return store_plain if dtype == torch.float64 else _store


def _store(
    keys: Tensor, values: Tensor, slots: Tensor, pools: tuple[Tensor, Tensor], scales: Scales, /
) -> None:
    store_kv(_side_by_side(keys), _side_by_side(values), slots, pools, scales)


def _side_by_side(heads: Tensor) -> Tensor:
    """The heads of a token; tokens may lie apart."""
    is_so = heads.stride()[1:] == (heads.shape[2], 1)
    return heads if is_so else heads.contiguous()
