"""Attention by FlashInfer's paged kernels: the first choice on CUDA.

A forward is planned once on the host, from exact lengths: one plan for all layers that are alike.
Pages are listed on the device when the forward begins. It knows no model. Written: the keys and
values of the forward's own slots, and its own workspaces.
"""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
from collections.abc import Mapping
from typing import TypeAlias, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import (
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
    own_plan,
)
from aserve.gpu.attention.flashinfer.cascade import GROUP, NO_CASCADE, CascadePlan, Cascades
from aserve.gpu.attention.flashinfer.page_indices import KERNELS, ListOps, PageList
from aserve.gpu.attention.flashinfer.plan import FlashPlan, write_arrays
from aserve.gpu.attention.flashinfer.plan_buffers import PlanSlots
from aserve.gpu.attention.flashinfer.static_plans import FlashStaticPlans, StaticPlan
from aserve.gpu.attention.flashinfer.wrappers import (
    FP8,
    HOPPER_TILE,
    FlashInferPackage,
    Problem,
    Queries,
    Wrapper,
    Wrappers,
    check_version,
    queries_of,
)
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch
from aserve.messages.base import ArrayI32

# Of a compiler, of what it links, and of a release that names its arguments otherwise.
BUILD_ERRORS = (
    *(RuntimeError, OSError, ValueError, subprocess.SubprocessError),
    *(ImportError, AttributeError, TypeError, AssertionError),
)

Key: TypeAlias = tuple[Problem, Queries]  # of a wrapper
Slots: TypeAlias = PlanSlots[Key, Wrapper]


class FlashInfer:
    """Written by plan: workspaces, in turn."""

    __slots__ = (
        "_cascades",
        "_kinds",
        "_ops",
        "_pages",
        "_problems",
        "_site",
        "_slots",
        "_wrappers",
        "static_plans",
    )

    def __init__(
        self,
        package: FlashInferPackage,
        site: AttentionSite,
        *,
        ops: ListOps = KERNELS,
    ) -> None:
        pools = site.pools
        self._site = site
        self._ops = ops
        self._problems = {
            layer.index: Problem(
                pools.layers[layer.index].group, msgspec.structs.replace(layer, index=0)
            )
            for layer in site.layers
        }
        self._pages = {
            index: (_by_page(kv.keys, pools.page_size), _by_page(kv.values, pools.page_size))
            for index, kv in pools.layers.items()
        }
        self._wrappers = Wrappers(package, site)
        self._kinds = tuple(dict.fromkeys(self._problems.values()))
        self._cascades = Cascades(self._wrappers, site, self._kinds)
        self._slots = Slots(site.device, site.num_plans)
        self.static_plans = FlashStaticPlans(
            self._wrappers, site, self._kinds, cascades=self._cascades
        )

    def plan(self, batch: ForwardBatch) -> object:
        if batch.lens_cpu is None:
            raise BugError(f"step {batch.iteration}: FlashInfer plans from exact lengths only")
        if not batch.num_rows:
            return FlashPlan({}, {})
        if self._cascades.is_worthwhile(batch.num_rows, batch.shared_pages):
            return self._plan(batch, batch.lens_cpu, self._cascades.plan(batch, batch.lens_cpu))
        return self._plan(batch, batch.lens_cpu, NO_CASCADE)

    def _plan(self, batch: ForwardBatch, lens: ArrayI32, cascade: CascadePlan) -> FlashPlan:
        slot = self._slots.take()
        queries = queries_of(batch.query_lens_cpu, lens)
        problems = [kind for kind in self._kinds if kind not in cascade.wrappers]
        host = write_arrays(
            slot, self._site, lens=lens, query_lens=batch.query_lens_cpu, problems=problems
        )
        lists: dict[int, PageList] = {}
        for group, own in host.items():
            num_pages, where = int(own.starts[-1]), self._site.pools.device
            pages = torch.empty(num_pages, dtype=torch.int32, device=where)
            lists[group] = PageList.new(batch.num_rows, pages)
        wrappers: dict[Problem, Wrapper] = {}
        for problem in problems:
            wrapper = slot.wrappers.get((problem, queries))
            if wrapper is None:
                wrapper = self._wrappers.make(problem, queries)
                slot.wrappers[problem, queries] = wrapper
            arrays, pages = host[problem.group], lists[problem.group].pages
            is_decode = queries is Queries.ONE_EACH
            self._wrappers.plan(wrapper, problem, arrays, pages=pages, is_decode=is_decode)
            wrappers[problem] = wrapper
        slot.close()
        return FlashPlan(lists, wrappers, cascade)

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        found = own_plan(batch, plan.value if isinstance(plan, StaticPlan) else plan, FlashPlan)
        self._list_pages(batch, found.lists)
        found.cascade.list_pages(batch, self._site.pools.page_tables[GROUP], self._ops.gather)
        wrappers, cascades = found.wrappers, found.cascade.wrappers

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._site.pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            problem, pages = self._problems[layer.index], self._pages[layer.index]
            if problem in cascades:
                return cascades[problem].run(q.contiguous(), pages)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if not len(q):
                return out
            k_scale, v_scale = kv.scales
            scales = {} if kv.scales == (1.0, 1.0) else {"k_scale": k_scale, "v_scale": v_scale}
            lines = q if q.stride(2) == 1 else q.contiguous()
            return wrappers[problem].run(lines, pages, out=out, **scales)

        return attend

    def try_out(self) -> None:
        """A prefill that fills tiles and one that does not, a decode and one in two levels of the
        padding row, through one layer of each kind: compiles what is not compiled yet, which takes
        minutes."""
        where = self._site.pools.device
        longest = self._site.pools.page_tables[0].shape[1] * self._site.pools.page_size
        of_kind = {self._problems[layer.index]: layer for layer in self._site.layers}
        for query_len, num_shared in ((min(HOPPER_TILE, longest), 0), (2, 0), (1, 0), (1, 1)):
            padding = _padding(query_len, where, kv_len=num_shared * self._site.pools.page_size)
            padding = dataclasses.replace(padding, shared_pages=num_shared)
            batch = ForwardBatch.init_new(padding, self._site.pools)
            lens = padding.len_bounds_cpu
            cascade = self._cascades.plan(batch, lens) if num_shared else NO_CASCADE
            attend = self.bind(batch, self._plan(batch, lens, cascade))
            for layer in of_kind.values():
                shape = (query_len, layer.num_heads + 2 * layer.num_kv_heads, layer.head_dim)
                heads = torch.zeros(shape, dtype=self._site.dtype, device=where)
                attend(layer, AttentionInputs(heads))
        self._site.device.mark().synchronize()

    def _list_pages(self, batch: ForwardBatch, lists: Mapping[int, PageList]) -> None:
        pools, windows = self._site.pools, self._site.windows
        for group, own in lists.items():
            table, window = pools.page_tables[group], windows[group]
            own.write(batch, table, self._ops, window=window, page_size=pools.page_size)


def _by_page(pool: Tensor, page_size: int) -> Tensor:
    """[slots, kv_heads, head_dim] -> [pages, page_size, kv_heads, head_dim]"""
    return pool.view(-1, page_size, *pool.shape[1:])


def _padding(query_len: int, where: torch.device, *, kv_len: int) -> DeviceBatch:
    """Tokens of row 0, which has no pages and is nobody's, behind `kv_len` others."""
    zeros = torch.zeros(query_len, dtype=torch.int64, device=where)
    query_lens_cpu = np.array([query_len], np.int32)
    return DeviceBatch(
        iteration=0,
        rows=zeros[:1],
        query_lens=zeros[:1] + query_len,
        kv_lens=zeros[:1] + kv_len,
        input_ids=zeros,
        token_to_row=zeros,
        offsets=torch.arange(query_len, device=where),
        query_lens_cpu=query_lens_cpu,
        len_bounds_cpu=query_lens_cpu + np.int32(kv_len),
        is_exact=True,
    )


def build_flashinfer(
    package: FlashInferPackage, site: AttentionSite, *, ops: ListOps = KERNELS
) -> FlashInfer:
    """Raises AttentionUnavailable where its kernels cannot be compiled or run."""
    check_version(package)
    try:
        with site.device.stream():
            backend = FlashInfer(package, site, ops=ops)
            backend.try_out()
    except BUILD_ERRORS as error:
        raise AttentionUnavailable(f"cannot be compiled or run: {_first_line(error)}") from error
    return backend


def _build(site: AttentionSite) -> FlashInfer:
    return build_flashinfer(cast(FlashInferPackage, importlib.import_module("flashinfer")), site)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


KIND = AttentionKind(
    Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        kv_dtypes=frozenset({FP8}),
        head_dims=frozenset({64, 128, 256}),
        host_lens=True,
        can_capture=True,
        shared_pages=True,
    ),
    _build,
)
