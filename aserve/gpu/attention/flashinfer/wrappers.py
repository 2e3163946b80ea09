"""FlashInfer's wrapper objects: how they are made, and how one plans for layers of one kind.

The package has no types where it is not installed, so this file declares the part of it that is
used. Source: https://docs.flashinfer.ai, as of 0.6.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionSite, AttentionUnavailable
from aserve.gpu.attention.flashinfer.latent_wrapper import LatentWrapper, MlaModule
from aserve.gpu.attention.flashinfer.page_indices import PageIndices
from aserve.gpu.kv.layer_groups import LayerSpec, Mask
from aserve.gpu.kv.store import FP8
from aserve.messages.base import ArrayI32
from aserve_kernels.packed_mask import PackedMask

logger = logging.getLogger(__name__)

MIN_VERSION = (0, 6)
# Earlier releases plan in Python loops: the maximum of 256 lengths alone takes them 0.45 ms.
FAST_VERSION = (0, 7)
LAYOUT = "NHD"  # [pages, page_size, kv_heads, head_dim], as our pools are
# Workspace for partial results of rows that are split among thread blocks. A prefill takes query
# heads per KV head * concurrent thread blocks (two on each of 132 multiprocessors) * tile of 128
# queries * head_dim * 4 bytes; this is enough for 8 query heads of 256 or 16 of 128.
FLOAT_BYTES = 384 << 20
DECODE_TILE = 16  # queries of a KV head in one tile of a decode; 64 from more heads on
# The planner writes a few numbers per row and thread block; a wrapper's own default is 8 MiB.
STATIC_INT_BYTES = 1 << 20
# From so many query heads per KV head on, decode uses tensor cores. Below it, the kernel without
# them reads KV as fast and is planned in less time.
MIN_TENSOR_CORE_HEADS = 4
# The "fa2" kernels, for every GPU, stack the query heads of a KV head in one tile, choose the tile
# size by the average row, and split long rows. The Hopper kernels have tiles of HOPPER_TILE queries
# of one head and split no row. They are faster if their tiles are full, but a decode row would read
# its keys once per head, on one multiprocessor, for a tile that is almost empty.
EVERY_GPU = "fa2"
HOPPER_TILE = 128
MAX_PADDING = 2.0  # scores computed in Hopper tiles / scores needed


class Queries(Enum):
    """The three kinds of forwards, which use different kernels."""

    DECODE = "one query per row"
    PARTIAL_TILES = "rows that leave Hopper tiles mostly empty"
    FULL_TILES = "rows that fill Hopper tiles"
    TREES = "draft trees, each with a mask"


def queries_of(query_lens: ArrayI32, lens: ArrayI32) -> Queries:
    """query_lens and KV lengths with them, int32 [rows]."""
    needed = query_lens.astype(np.int64) @ lens
    if query_lens.sum() == len(query_lens):
        return Queries.DECODE
    tiled = (-(-query_lens // HOPPER_TILE) * HOPPER_TILE).astype(np.int64) @ lens
    return Queries.FULL_TILES if tiled <= MAX_PADDING * needed else Queries.PARTIAL_TILES


def decode_bytes(layer: LayerSpec, num_rows: int) -> int:
    """Returns the workspace of a captured decode of `num_rows` rows in FlashInfer 0.6: a partial
    result and its log-sum-exp, in float32, for each query of each tile. The planner rounds every
    row up to a tile of its own."""
    per_kv_head = -(-layer.num_heads // layer.num_kv_heads)
    tile = DECODE_TILE if per_kv_head <= DECODE_TILE else 4 * DECODE_TILE
    num_tiles = -(-num_rows * per_kv_head // tile) + num_rows - 1
    return layer.num_heads * num_tiles * tile * (layer.out_dim + 1) * 4


class Wrapper(Protocol):
    """A FlashInfer wrapper. One `plan` serves many `run` calls. It has a pinned buffer of its own,
    which the device reads after `plan` has returned."""

    @property
    def plan(self) -> Callable[..., None]: ...

    @property
    def run(self) -> Callable[..., Tensor]: ...

    @property
    def reset_workspace_buffer(self) -> Callable[[Tensor, Tensor], None]: ...


class Masked(Protocol):
    """The attributes of a prefill wrapper in which it keeps its mask. `run` uses the mask if there
    is one."""

    _custom_mask_buf: Tensor
    _mask_indptr_buf: Tensor


class LevelWrapper(Protocol):
    """A Wrapper that also returns the log-sum-exp of the scores, float32 [queries, heads]."""

    @property
    def plan(self) -> Callable[..., None]: ...

    @property
    def run(self) -> Callable[..., tuple[Tensor, Tensor]]: ...


class KernelModule(Protocol):
    """A JitSpec: a module that is compiled, or still to be."""

    @property
    def name(self) -> str: ...

    @property
    def is_compiled(self) -> bool: ...


class ModuleClass(Protocol):
    """The class of all modules. Plans call its method for the module that they need."""

    build_and_load: Callable[..., object]


class JitCore(Protocol):
    """flashinfer.jit.core"""

    @property
    def JitSpec(self) -> ModuleClass: ...

    @property
    def build_jit_specs(self) -> Callable[[list[KernelModule]], None]: ...


class Jit(Protocol):
    @property
    def core(self) -> JitCore: ...


class FlashInferPackage(Protocol):
    """The part of the package that is used."""

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]: ...

    @property
    def BatchDecodeWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]: ...

    @property
    def mla(self) -> MlaModule: ...

    @property
    def jit(self) -> Jit: ...

    @property
    def merge_state_in_place(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]: ...

    @property
    def __version__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one group that look the same to a kernel, so that one plan serves them all."""

    group: int
    layer: LayerSpec  # any of them, with index 0

    @classmethod
    def of(cls, group: int, layer: LayerSpec) -> LayerKind:
        return cls(group, msgspec.structs.replace(layer, index=0, kv_layer=None))


@dataclass(frozen=True, slots=True)
class PlanArrays:
    """The planner's inputs for one layer group, int32 in pinned memory: the CSR form of its pages
    (page_indices.py) without the indices."""

    cu_query_lens: Tensor  # [rows + 1]
    indptr: Tensor  # [rows + 1]
    last_page_lens: Tensor  # [rows]
    lens: Tensor  # [rows], tokens in all listed pages


@dataclass(frozen=True, slots=True)
class CascadeWrapper:
    """Attends to the keys of each level, and merges the results by their log-sum-exps."""

    levels: tuple[LevelWrapper, ...]
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        """q [queries, heads, head_dim], contiguous; pages: the pools of keys and of values."""
        out, lse = self.levels[-1].run(q, pages, return_lse=True)
        for level in self.levels[:-1]:
            self.merge(out, lse, *level.run(q, pages, return_lse=True))
        return out


class Wrappers:
    """Makes wrappers. All share one float workspace. Those of captured forwards also share one
    integer workspace per layer kind, which is safe because plans and replays run in one order on
    one stream."""

    __slots__ = ("_float_workspace", "_int_workspaces", "_site", "package")

    def __init__(self, package: FlashInferPackage, site: AttentionSite) -> None:
        self.package = package
        self._site = site
        num_rows = site.pools.page_tables[0].shape[0]
        self._float_workspace = self._bytes(
            max(FLOAT_BYTES, *(decode_bytes(layer, num_rows) for layer in site.layers), 0)
        )
        self._int_workspaces: dict[LayerKind, Tensor] = {}

    def make(self, kind: LayerKind, queries: Queries) -> Wrapper:
        if kind.layer.value_dim is not None:
            return self._latents()
        if queries is not Queries.DECODE:
            return self._prefill("auto" if queries is Queries.FULL_TILES else EVERY_GPU)
        return self.package.BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace,
            LAYOUT,
            use_tensor_cores=self._takes_tensor_cores(kind),
            backend=EVERY_GPU,
        )

    def _latents(self, **buffers: object) -> LatentWrapper:
        inner = self.package.mla.BatchMLAPagedAttentionWrapper(self._float_workspace, **buffers)
        return LatentWrapper(inner, self._site.device.host_buffer)

    def _prefill(self, backend: str) -> Wrapper:
        return self.package.BatchPrefillWithPagedKVCacheWrapper(
            self._float_workspace, LAYOUT, backend=backend
        )

    def make_static(
        self, kind: LayerKind, pages: PageIndices, *, cu_query_lens: Tensor, is_decode: bool
    ) -> Wrapper:
        """Returns a wrapper for captured forwards, whose kernels read `pages` and cu_query_lens,
        int32 [rows + 1], at fixed addresses.
        """
        csr = pages.csr
        wrapper: Wrapper
        if kind.layer.value_dim is not None:
            wrapper = self._latents(
                use_cuda_graph=True,
                qo_indptr=cu_query_lens,
                kv_indptr=csr.indptr,
                kv_indices=pages.indices,
                kv_len_arr=torch.empty_like(csr.last_page_lens),  # written by `plan`, never read
            )
        elif is_decode:
            wrapper = self.package.BatchDecodeWithPagedKVCacheWrapper(
                self._float_workspace,
                LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=self._takes_tensor_cores(kind),
                backend=EVERY_GPU,
                paged_kv_indptr_buffer=csr.indptr,
                paged_kv_indices_buffer=pages.indices,
                paged_kv_last_page_len_buffer=csr.last_page_lens,
            )
        else:
            wrapper = self.package.BatchPrefillWithPagedKVCacheWrapper(
                self._float_workspace,
                LAYOUT,
                use_cuda_graph=True,
                backend=EVERY_GPU,
                qo_indptr_buf=cu_query_lens,
                paged_kv_indptr_buf=csr.indptr,
                paged_kv_indices_buf=pages.indices,
                paged_kv_last_page_len_buf=csr.last_page_lens,
            )
        if kind not in self._int_workspaces:
            self._int_workspaces[kind] = self._bytes(STATIC_INT_BYTES)
        wrapper.reset_workspace_buffer(self._float_workspace, self._int_workspaces[kind])
        return wrapper

    def plan(
        self,
        wrapper: Wrapper,
        kind: LayerKind,
        host: PlanArrays,
        *,
        indices: Tensor,
        width: int | None,
        mask: PackedMask | None = None,
    ) -> None:
        """`indices` and `mask`, on the device, may be written after this call. Every row has
        `width` queries; None: they differ.

        WHY the two attributes: given a mask, `plan` computes its indptr in memory that is not
        pinned, so the host would wait for the copy; and it counts bits, where kernels read bytes.
        """
        layer, value_dim = kind.layer, kind.layer.value_dim
        if value_dim is not None:
            wrapper.plan(
                *(host.cu_query_lens, host.indptr, indices, host.lens),
                *(layer.num_heads, value_dim, layer.head_dim - value_dim),
                *(self._site.pools.page_size, True, layer.scale),  # causal
                *(self._site.dtype, self._site.pools.dtype),
            )
            return
        paged = (host.indptr, indices, host.last_page_lens)
        shape, details = self._layer_arguments(kind)
        if width == 1:
            wrapper.plan(*paged, *shape, seq_lens=host.lens, **details)
            return
        if mask is not None:
            details["window_left"] = -1  # windows are in the mask
        elif width is not None and takes_width(type(wrapper)):
            details["uniform_q_len"] = width
        is_causal = kind.layer.mask is Mask.CAUSAL
        wrapper.plan(host.cu_query_lens, *paged, *shape, causal=is_causal, **details)
        if mask is not None:
            masked = cast(Masked, wrapper)
            masked._custom_mask_buf, masked._mask_indptr_buf = mask.bits, mask.indptr

    def make_cascade(self, num_levels: int) -> CascadeWrapper:
        """WHY: the package's own cascade wrapper would choose Hopper kernels for each level."""
        levels = [self._prefill(EVERY_GPU) for _ in range(num_levels)]
        return CascadeWrapper(
            tuple(cast(LevelWrapper, level) for level in levels), self.package.merge_state_in_place
        )

    def plan_cascade(
        self,
        wrapper: CascadeWrapper,
        kind: LayerKind,
        levels: Sequence[PlanArrays],
        *,
        indices: Sequence[Tensor],
    ) -> None:
        """Plans each level from its arrays. `indices` may be written after this call. The last
        level is causal; queries see all keys of the levels before it."""
        shape, details = self._layer_arguments(kind)
        for level, own, listed in zip(wrapper.levels, levels, indices, strict=True):
            paged = (own.cu_query_lens, own.indptr, listed, own.last_page_lens)
            is_causal = own is levels[-1] and kind.layer.mask is Mask.CAUSAL
            level.plan(*paged, *shape, causal=is_causal, **details)

    def _layer_arguments(self, kind: LayerKind) -> tuple[tuple[int, ...], dict[str, object]]:
        layer = kind.layer
        shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim, self._site.pools.page_size)
        return shape, {
            "sm_scale": layer.scale,
            "window_left": -1 if layer.window is None else layer.window - 1,
            "logits_soft_cap": layer.softcap,
            "q_data_type": self._site.dtype,
            "kv_data_type": self._site.pools.dtype,
        }

    def _takes_tensor_cores(self, kind: LayerKind) -> bool:
        heads = kind.layer.num_heads // kind.layer.num_kv_heads
        return self._site.pools.dtype == FP8 or heads >= MIN_TENSOR_CORE_HEADS

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._site.pools.device)


@functools.cache
def takes_width(wrapper: type[Wrapper]) -> bool:
    """Whether a captured plan can be told that all rows have the same number of queries.

    PERF: else it has tiles for a row of all queries but one of each other row. 256 rows of 4
    queries, 32 heads and KV heads of 128, in 0.7.4: tiles of 128 queries and a workspace of
    530 MiB, in place of 16 and 64 MiB (computed from the planner's source, not run).
    """
    return "uniform_q_len" in inspect.signature(wrapper.plan).parameters


def check_version(package: FlashInferPackage) -> None:
    version = package.__version__
    if is_before(version, MIN_VERSION):
        raise AttentionUnavailable(f"has version {version}, but needs {_words(MIN_VERSION)}")
    if is_slow(version):
        logger.warning(
            "FlashInfer %s plans an eager step slowly, in Python loops over its rows; %s does not",
            *(version, _words(FAST_VERSION)),
        )


def is_slow(version: str) -> bool:
    """Whether this release of the package plans in Python loops."""
    return is_before(version, FAST_VERSION)


def is_before(version: str, other: tuple[int, int]) -> bool:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < other


def _words(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
