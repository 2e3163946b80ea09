"""Attention backends by name. A new one is a file in this folder and a line here.

A line imports its file when it is called: some need packages that a machine may not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aserve.gpu.attention.base import AttentionKind


def _flashinfer() -> AttentionKind:
    import flashinfer  # noqa: F401  # a package that only a GPU needs: without it there is no kind

    from aserve.gpu.attention.flashinfer import KIND

    return KIND


def _paged_cpu() -> AttentionKind:
    from aserve.gpu.attention.paged_cpu import KIND

    return KIND


def _paged_sdpa() -> AttentionKind:
    from aserve.gpu.attention.paged_sdpa import KIND

    return KIND


def _torch_ref() -> AttentionKind:
    from aserve.gpu.attention.torch_ref import KIND

    return KIND


def _triton() -> AttentionKind:
    from aserve.gpu.attention.triton import KIND

    return KIND


BACKENDS: Mapping[str, Callable[[], AttentionKind]] = {
    "flashinfer": _flashinfer,
    "paged-cpu": _paged_cpu,
    "paged-sdpa": _paged_sdpa,
    "torch-ref": _torch_ref,
    "triton": _triton,
}
