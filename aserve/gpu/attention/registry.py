"""Attention backends by name. A new one is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aserve.gpu.attention.base import AttentionBackend
from aserve.gpu.attention.paged_sdpa import PagedSdpa
from aserve.gpu.attention.torch_ref import TorchReference
from aserve.gpu.kv.pools import KvPools

Windows = tuple[int | None, ...]  # per layer group

BACKENDS: Mapping[str, Callable[[KvPools, Windows], AttentionBackend]] = {
    "paged-sdpa": PagedSdpa,
    "torch-ref": lambda pools, _windows: TorchReference(pools),
}
