"""FlashInfer's wrapper for latents (absorbed MLA), in the form of its other wrappers.

    out_h = softmax(scale * (q_nope_h c^T + q_pe_h k_pe^T) + causal mask) c

Its kernels read two pools, c [pages, page_size, 512] and k_pe [pages, page_size, 64]. Here both are
views of one pool of latents. What its planner reads (indptr and lengths) reaches the kernels in the
integer workspace alone. Source: https://docs.flashinfer.ai/api/mla.html, as of 0.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionSite, AttentionUnavailable
from aserve.gpu.attention.latents import has_only_latents
from aserve.gpu.kv.layer_groups import LayerSpec, Mask

VALUE_DIM = 512  # the only sizes for which there are kernels, those of DeepSeek
HEAD_DIM = VALUE_DIM + 64
OWN_WORKSPACES = "MLAPlanMetadata"  # flashinfer.mla has it since its wrapper was rewritten, in 0.7


class MlaWrapper(Protocol):
    """The package's wrapper. Captured forwards replace its integer workspace and the pinned memory
    that the planner copies to it."""

    _int_workspace_buffer: Tensor
    _pin_memory_int_workspace_buffer: Tensor

    @property
    def _cached_module(self) -> object: ...

    @property
    def plan(self) -> Callable[..., None]: ...

    @property
    def run(self) -> Callable[..., Tensor]: ...


class MlaModule(Protocol):
    @property
    def BatchMLAPagedAttentionWrapper(self) -> Callable[..., MlaWrapper]: ...


class LatentWrapper:
    """A `Wrapper` of latents. `plan` is that of the package."""

    __slots__ = ("_host_buffer", "_inner", "plan")

    def __init__(self, inner: MlaWrapper, host_buffer: Callable[[int], Tensor]) -> None:
        """`host_buffer` allocates so many words of pinned memory, int32."""
        self._inner = inner
        self._host_buffer = host_buffer
        self.plan = inner.plan

    @property
    def _cached_module(self) -> object:
        return self._inner._cached_module

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """q [queries, heads, r + d_rope], pages as `latent_pages` returns them -> out [queries,
        heads, r]."""
        value_dim = out.shape[2]
        return self._inner.run(q[..., :value_dim], q[..., value_dim:], *pages, out=out)

    def reset_workspace_buffer(self, _float_workspace: Tensor, int_workspace: Tensor) -> None:
        pinned = self._host_buffer(int_workspace.nbytes // 4)
        self._inner._int_workspace_buffer = int_workspace
        self._inner._pin_memory_int_workspace_buffer = pinned.view(torch.uint8)


def latent_pages(pool: Tensor, page_size: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """pool [slots, 1, r + d_rope] -> c [pages, page_size, r], k_pe [pages, page_size, d_rope]"""
    pages = pool.view(-1, page_size, pool.shape[2])
    return pages[..., :value_dim], pages[..., value_dim:]


def check_latents(site: AttentionSite, module: Callable[[], MlaModule]) -> None:
    """Raises AttentionUnavailable for latents that the kernels, or this release, do not support.

    WHY not 0.7: its wrapper makes a workspace of its own in each plan, and ignores the one that
    plans of captured forwards share. A replay would read the plan of another step.
    """
    if not has_only_latents(site):
        if any(layer.head_dim == HEAD_DIM for layer in site.layers):
            raise AttentionUnavailable(f"supports head_dim {HEAD_DIM} in layers of latents only")
        return
    if hasattr(module(), OWN_WORKSPACES):
        raise AttentionUnavailable(
            "cannot share a workspace among plans of latent KV from 0.7 on; 0.6 can"
        )
    if site.has_tree_masks:
        raise AttentionUnavailable("does not support tree masks with latent KV")
    if site.pools.dtype != site.dtype:
        raise AttentionUnavailable("supports latent KV in the dtype of the model only")
    if not all(map(_is_supported, site.layers)):
        raise AttentionUnavailable(
            f"supports latent KV of {VALUE_DIM} + {HEAD_DIM - VALUE_DIM} values, in layers with a "
            "plain causal mask only"
        )


def _is_supported(layer: LayerSpec) -> bool:
    is_plain = layer.window is None and layer.softcap is None and layer.mask is Mask.CAUSAL
    return is_plain and (layer.head_dim, layer.value_dim) == (HEAD_DIM, VALUE_DIM)
