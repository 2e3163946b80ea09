"""FlashInfer's wrappers: how they are made, and how one plans for layers that are alike.

It knows no forward. The package has no types where it is not installed; what is used of it is here.
Source: https://docs.flashinfer.ai, as of 0.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionSite, AttentionUnavailable
from aserve.gpu.attention.flashinfer.page_indices import PageList
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.messages.base import ArrayI32

LEAST_VERSION = (0, 6)
LAYOUT = "NHD"  # [pages, page_size, kv_heads, head_dim], as our pools are
# For parts of rows that are computed apart. Of a prefill: query heads per KV head * thread blocks
# at once (two on each of 132 multiprocessors) * tile of 128 queries * head_dim * 4 bytes; enough
# for 8 query heads of 256 or 16 of 128.
FLOAT_BYTES = 384 << 20
# A few numbers for each row or thread block; a wrapper takes 8 MiB by itself.
STATIC_INT_BYTES = 1 << 20
FP8 = torch.float8_e4m3fn
# So many query heads of one KV head fill the tiles of matrix instructions; below it plain
# instructions read keys and values as fast, and are planned in less time.
MIN_TENSOR_CORE_HEADS = 4
# Its kernels for every GPU take the query heads of a KV head together, in tiles as small as rows
# are short on average, and cut long rows into parts. Those for Hopper, which are faster where their
# tiles are full, have tiles of so many queries of one head, and cut no row: a decode would read its
# keys once for each head, by one processor, and multiply them with a tile of nothing.
EVERY_GPU = "fa2"
HOPPER_TILE = 128
MOST_PADDING = 2.0  # of the tiles' scores over those that are wanted


class Queries(Enum):
    ONE_EACH = "decodes"
    FEW = "rows that leave tiles empty"
    MANY = "rows that fill tiles"


def queries_of(query_lens: ArrayI32, lens: ArrayI32) -> Queries:
    """int32 [rows] each: how many queries a row has, and its KV length with them."""
    wanted = query_lens.astype(np.int64) @ lens
    if query_lens.sum() == len(query_lens):
        return Queries.ONE_EACH
    tiled = (-(-query_lens // HOPPER_TILE) * HOPPER_TILE).astype(np.int64) @ lens
    return Queries.MANY if tiled <= MOST_PADDING * wanted else Queries.FEW


class Wrapper(Protocol):
    """Plans once for many layers. It has a pinned buffer of its own, which the device reads after
    `plan` has returned."""

    @property
    def plan(self) -> Callable[..., None]: ...

    @property
    def run(self) -> Callable[..., Tensor]: ...

    @property
    def reset_workspace_buffer(self) -> Callable[[Tensor, Tensor], None]: ...


class LevelWrapper(Protocol):
    """A Wrapper that is asked for the sums of its softmax as well: float32 [queries, heads]."""

    @property
    def plan(self) -> Callable[..., None]: ...

    @property
    def run(self) -> Callable[..., tuple[Tensor, Tensor]]: ...


class FlashInferPackage(Protocol):
    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]: ...

    @property
    def BatchDecodeWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]: ...

    @property
    def merge_state_in_place(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]: ...

    @property
    def __version__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Problem:
    """What one plan serves: layers of a group that differ in nothing that a kernel sees."""

    group: int
    layer: LayerSpec  # any of them, as number 0


@dataclass(frozen=True, slots=True)
class Arrays:
    """Of one layer group, int32, in pinned memory of the host: what a plan is made from. Row r has
    the queries from query_starts[r] on, and of the list of pages those from starts[r] on, of the
    last one last_lens[r] tokens, and lens[r] in all of them."""

    cu_query_lens: Tensor  # [rows + 1]
    starts: Tensor  # [rows + 1]
    last_lens: Tensor  # [rows]
    lens: Tensor  # [rows]


@dataclass(frozen=True, slots=True)
class CascadeWrapper:
    """Attention to the keys of each level by itself; results are merged by their sums."""

    levels: tuple[LevelWrapper, ...]
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], None]

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        """q [queries, heads, head_dim], contiguous; pages: of keys and of values."""
        out, sums = self.levels[-1].run(q, pages, return_lse=True)
        for level in self.levels[:-1]:
            self.merge(out, sums, *level.run(q, pages, return_lse=True))
        return out


class Wrappers:
    """Makes them. Those of captured forwards share what they have on the device, problem by
    problem: plans and replays come in one order, on one stream."""

    __slots__ = ("_float_workspace", "_int_workspaces", "_package", "_site")

    def __init__(self, package: FlashInferPackage, site: AttentionSite) -> None:
        self._package = package
        self._site = site
        self._float_workspace = self._bytes(FLOAT_BYTES)
        self._int_workspaces: dict[Problem, Tensor] = {}

    def make(self, problem: Problem, queries: Queries) -> Wrapper:
        if queries is not Queries.ONE_EACH:
            return self._prefill("auto" if queries is Queries.MANY else EVERY_GPU)
        return self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace,
            LAYOUT,
            use_tensor_cores=self._takes_tensor_cores(problem),
            backend=EVERY_GPU,
        )

    def _prefill(self, backend: str) -> Wrapper:
        return self._package.BatchPrefillWithPagedKVCacheWrapper(
            self._float_workspace, LAYOUT, backend=backend
        )

    def make_static(
        self, problem: Problem, pages: PageList, *, cu_query_lens: Tensor, is_decode: bool
    ) -> Wrapper:
        """Its kernels read `pages` and query_starts int32 [rows + 1], which stay where they are."""
        indices = pages.indices
        if is_decode:
            wrapper = self._package.BatchDecodeWithPagedKVCacheWrapper(
                self._float_workspace,
                LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=self._takes_tensor_cores(problem),
                backend=EVERY_GPU,
                paged_kv_indptr_buffer=indices.indptr,
                paged_kv_indices_buffer=pages.pages,
                paged_kv_last_page_len_buffer=indices.last_page_lens,
            )
        else:
            wrapper = self._package.BatchPrefillWithPagedKVCacheWrapper(
                self._float_workspace,
                LAYOUT,
                use_cuda_graph=True,
                backend=EVERY_GPU,
                qo_indptr_buf=cu_query_lens,
                paged_kv_indptr_buf=indices.indptr,
                paged_kv_indices_buf=pages.pages,
                paged_kv_last_page_len_buf=indices.last_page_lens,
            )
        if problem not in self._int_workspaces:
            self._int_workspaces[problem] = self._bytes(STATIC_INT_BYTES)
        wrapper.reset_workspace_buffer(self._float_workspace, self._int_workspaces[problem])
        return wrapper

    def plan(
        self, wrapper: Wrapper, problem: Problem, host: Arrays, *, pages: Tensor, is_decode: bool
    ) -> None:
        """`pages`, on the device, may be written later."""
        paged = (host.starts, pages, host.last_lens)
        shape, details = self._about(problem)
        if is_decode:
            wrapper.plan(*paged, *shape, seq_lens=host.lens, **details)
        else:
            wrapper.plan(host.cu_query_lens, *paged, *shape, causal=True, **details)

    def make_cascade(self, num_levels: int) -> CascadeWrapper:
        """WHY not the package's own: it lets each level run as it would choose on Hopper."""
        levels = [self._prefill(EVERY_GPU) for _ in range(num_levels)]
        return CascadeWrapper(
            tuple(cast(LevelWrapper, level) for level in levels), self._package.merge_state_in_place
        )

    def plan_cascade(
        self,
        wrapper: CascadeWrapper,
        problem: Problem,
        levels: Sequence[Arrays],
        *,
        pages: Sequence[Tensor],
    ) -> None:
        """Of each level its arrays and `pages`, which may be written later. In the last one a query
        sees no key behind it, in those before it all."""
        shape, details = self._about(problem)
        for of_level, own, listed in zip(wrapper.levels, levels, pages, strict=True):
            paged = (own.cu_query_lens, own.starts, listed, own.last_lens)
            of_level.plan(*paged, *shape, causal=own is levels[-1], **details)

    def _about(self, problem: Problem) -> tuple[tuple[int, ...], dict[str, object]]:
        layer = problem.layer
        shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim, self._site.pools.page_size)
        return shape, {
            "sm_scale": layer.scale,
            "window_left": -1 if layer.window is None else layer.window - 1,
            "logits_soft_cap": layer.softcap,
            "q_data_type": self._site.dtype,
            "kv_data_type": self._site.pools.dtype,
        }

    def _takes_tensor_cores(self, problem: Problem) -> bool:
        heads = problem.layer.num_heads // problem.layer.num_kv_heads
        return self._site.pools.dtype == FP8 or heads >= MIN_TENSOR_CORE_HEADS

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._site.pools.device)


def check_version(package: FlashInferPackage) -> None:
    found = tuple(int(part) for part in re.findall(r"\d+", package.__version__)[:2])
    if found < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise AttentionUnavailable(f"is version {package.__version__}, and {least} is needed")
