"""Attention backends by name. A new one is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aserve.gpu.attention.base import AttentionBackend
from aserve.gpu.attention.paged_sdpa import PagedSdpa
from aserve.gpu.attention.torch_ref import TorchReference
from aserve.gpu.kv.pools import KvPools

Windows = tuple[int | None, ...]  # per layer group


def _paged_cpu(pools: KvPools, _windows: Windows) -> AttentionBackend:
    from aserve.gpu.attention.paged_cpu import PagedCpu  # numba, which a machine may not have

    return PagedCpu(pools)


BACKENDS: Mapping[str, Callable[[KvPools, Windows], AttentionBackend]] = {
    "paged-sdpa": PagedSdpa,
    "paged-cpu": _paged_cpu,
    "torch-ref": lambda pools, _windows: TorchReference(pools),
}
