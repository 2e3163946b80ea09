"""Attention by FlashInfer's paged kernels, the first choice on CUDA."""

# Theory of operation
# -------------------
# FlashInfer splits attention into `plan`, on the host, and `run`, on the device. `plan` reads exact
# KV lengths on the host, divides the rows among thread blocks, and copies the schedule to the
# device through a pinned buffer of the wrapper. `run` is one kernel launch per layer and reads the
# schedule. So one plan serves all layers of a *layer kind*: layers of one group that look the same
# to a kernel (heads, window, soft cap, scale). Most models have one kind, those that mix sliding
# windows with full attention have two.
#
# An eager forward goes through these steps:
#
#   1. `plan` takes the next slot of a ring (plan_buffers.py). The ring has slots for the plans of
#      one step more than are in flight, and a slot is reused after the event behind its plan. So
#      the pinned memory of a plan is never overwritten while the device may still read it.
#   2. plan.py writes indptr, last_page_lens and lengths of each layer group to the slot.
#   3. Each layer kind's wrapper plans. The wrapper depends on the queries of the forward: decode,
#      prefill that fills Hopper's tiles, or other prefill (wrappers.py). The decodes of a mixed
#      step, which come first, and its other rows have a plan each. In one plan, decodes would be
#      computed in tiles of the prefill's size, which they leave almost empty.
#   4. `bind` computes the page indices on the device (page_indices.py), once per layer group. The
#      host knows the number of pages, but not the page tables, which this step may change.
#   5. Each layer stores its keys and values and calls `run`, once for each part of the rows.
#
# A captured forward has static plans (static_plans.py). A CUDA graph replays kernels with fixed
# addresses, so all plans of one shape write to the same device memory, and the page indices have a
# buffer of fixed size. The capture contains step 4, which reads lengths on the device, and step 5.
# Before each replay the host only refreshes the plan, that is steps 1 to 3. The package's `plan` is
# mostly Python around one call of a compiled planner, and this call reads the lengths from the
# slot's arrays. plan.py finds that call once per wrapper and slot, and a refresh repeats it.
#
# Layers of latents (MLA) have a wrapper of their own (latent_wrapper.py) for all forwards, which is
# planned from the same arrays.
#
# Draft trees have masks of bits (packed_mask.py), which `bind` computes on the device as well. A
# mask holds the window, too, because the positions of nodes are their depths.
#
# Rows that share their first pages may use cascade attention (cascade.py), which reads the shared
# pages once for all rows. It is not captured, so it is used only where it saves more time than a
# replay does (`StaticPlans.is_better_eager`).
#
# Kernels are compiled when a process first uses them, which may take minutes. `compile_kernels`
# compiles all of them in one parallel build at start-up (kernel_modules.py) and then runs one small
# forward of each sort, so that failures show before the backend is chosen, and no request waits for
# a compiler.

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

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
from aserve.gpu.attention.flashinfer.kernel_modules import BUILD_ERRORS, compile_modules
from aserve.gpu.attention.flashinfer.latent_wrapper import HEAD_DIM, check_latents, latent_pages
from aserve.gpu.attention.flashinfer.page_indices import KERNELS, CsrOps, PageIndices
from aserve.gpu.attention.flashinfer.plan import (
    ALL_ROWS,
    FlashPlan,
    PlanPart,
    row_parts,
    write_arrays,
)
from aserve.gpu.attention.flashinfer.plan_buffers import PlanSlot, PlanSlots
from aserve.gpu.attention.flashinfer.static_plans import FlashStaticPlans, StaticPlan
from aserve.gpu.attention.flashinfer.wrappers import (
    HOPPER_TILE,
    FlashInferPackage,
    LayerKind,
    PlanArrays,
    Queries,
    Wrapper,
    Wrappers,
    check_version,
    queries_of,
)
from aserve.gpu.attention.triton import check_kv_dtype, make_sparse_ops
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask
from aserve.gpu.kv.pools import LayerKv
from aserve.gpu.kv.store import FP8
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import (
    NO_OVERRIDES,
    DeviceBatch,
    ForwardBatch,
    ForwardOverrides,
)
from aserve.messages.base import ArrayI32

WrapperKey: TypeAlias = tuple[LayerKind, Queries]
Slots: TypeAlias = PlanSlots[WrapperKey, Wrapper]


class FlashInfer:
    __slots__ = (
        "_cascades",
        "_kind_of",
        "_kinds",
        "_ops",
        "_pages",
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
        ops: CsrOps = KERNELS,
    ) -> None:
        pools = site.pools
        self._site = site
        self._ops = ops
        self._kind_of = {
            layer.index: LayerKind.of(pools.layers[layer.index].group, layer)
            for layer in site.layers
        }
        self._pages = {
            layer.index: _pages(pools.layers[layer.index], layer, pools.page_size)
            for layer in site.layers
        }
        self._wrappers = Wrappers(package, site)
        self._kinds = tuple(dict.fromkeys(self._kind_of.values()))
        self._cascades = Cascades(self._wrappers, site, self._kinds)
        self._slots = Slots(site.device, site.num_plans)
        self.static_plans = FlashStaticPlans(
            self._wrappers, site, self._kinds, cascades=self._cascades
        )

    def plan(self, batch: ForwardBatch) -> object:
        if batch.lens_cpu is None:
            raise BugError(f"step {batch.iteration}: FlashInfer plans from exact lengths only")
        if not batch.num_rows:
            return FlashPlan({}, ())
        is_tree = batch.tree_mask is not None
        if not is_tree and self._cascades.is_worthwhile(batch.num_rows, batch.shared_pages):
            return self._plan(batch, batch.lens_cpu, self._cascades.plan(batch, batch.lens_cpu))
        return self._plan(batch, batch.lens_cpu, NO_CASCADE)

    def _plan(self, batch: ForwardBatch, lens: ArrayI32, cascade: CascadePlan) -> FlashPlan:
        slot = self._slots.take()
        is_tree = batch.tree_mask is not None
        kinds = [kind for kind in self._kinds if kind not in cascade.wrappers]
        is_whole = is_tree or any(kind.layer.value_dim is not None for kind in kinds)
        parts = (ALL_ROWS,) if is_whole else row_parts(batch.query_lens_cpu)
        host = write_arrays(
            *(slot, self._site),
            lens=lens,
            query_lens=batch.query_lens_cpu,
            kinds=kinds,
            parts=parts,
        )
        pages = self._page_indices(batch, host)
        made: list[PlanPart] = []
        ends = dict.fromkeys(pages, 0)  # of the pages of the parts before
        for rows, arrays in zip(parts, host, strict=True):
            own = batch.query_lens_cpu[rows]
            queries = Queries.TREES if is_tree else queries_of(own, lens[rows])
            starts = dict(ends)
            ends = {group: starts[group] + int(arrays[group].indptr[-1]) for group in arrays}
            wrappers: dict[LayerKind, Wrapper] = {}
            for kind in kinds:
                wrappers[kind] = self._wrapper(slot, kind, queries)
                listed = pages[kind.group]
                self._wrappers.plan(
                    *(wrappers[kind], kind, arrays[kind.group]),
                    indices=listed.indices[starts[kind.group] : ends[kind.group]],
                    width=1 if queries is Queries.DECODE else None,
                    mask=listed.mask,
                )
            made.append(PlanPart(rows, wrappers))
        slot.close()
        return FlashPlan(pages, tuple(made), cascade)

    def _page_indices(
        self, batch: ForwardBatch, host: Sequence[Mapping[int, PlanArrays]]
    ) -> dict[int, PageIndices]:
        """Allocates the indices of all rows, and the masks of draft trees, by layer group."""
        pages: dict[int, PageIndices] = {}
        where = self._site.pools.device
        for group in host[0]:
            num_pages = sum(int(part[group].indptr[-1]) for part in host)
            indices = torch.empty(num_pages, dtype=torch.int32, device=where)
            bits, most = None, 0
            if batch.tree_mask is not None:
                num_bits = batch.query_lens_cpu.astype(np.int64) * host[0][group].lens.numpy()
                num_bytes = -(-num_bits // 8)
                most = int(num_bytes.max())
                bits = torch.empty(int(num_bytes.sum()) + 1, dtype=torch.uint8, device=where)
            pages[group] = PageIndices.empty(batch.num_rows, indices, bits, max_mask_bytes=most)
        return pages

    def _wrapper(
        self, slot: PlanSlot[WrapperKey, Wrapper], kind: LayerKind, queries: Queries
    ) -> Wrapper:
        wrapper = slot.wrappers.get((kind, queries))
        if wrapper is None:
            wrapper = slot.wrappers[kind, queries] = self._wrappers.make(kind, queries)
        return wrapper

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        value = plan.value if isinstance(plan, StaticPlan) else plan
        own = own_plan(batch, value, FlashPlan, tree_masks=True)
        self._write_indices(batch, own.pages)
        own.cascade.write_indices(batch, self._site.pools.page_tables[GROUP], self._ops.indices)
        parts, cascades = own.parts, own.cascade.wrappers

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._site.pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            kind, pages = self._kind_of[layer.index], self._pages[layer.index]
            if kind in cascades:
                return cascades[kind].run(q.contiguous(), pages)
            out = q.new_empty((*q.shape[:2], layer.out_dim))
            if not len(q):
                return out
            k_scale, v_scale = kv.scales
            scales = {} if kv.scales == (1.0, 1.0) else {"k_scale": k_scale, "v_scale": v_scale}
            q = q if q.stride(2) == 1 else q.contiguous()
            for part in parts:
                tokens = part.tokens
                part.wrappers[kind].run(q[tokens], pages, out=out[tokens], **scales)
            return out

        return attend

    def compile_kernels(self) -> None:
        """Compiles all kernels, which may take minutes, and runs them on the padding row: for one
        layer of each kind a prefill that fills Hopper tiles, one that does not, a decode, a decode
        with cascade attention, and where there are draft trees a tree."""
        compile_modules(self._wrappers, self._site, self._kinds)
        where = self._site.pools.device
        longest = self._site.pools.page_tables[0].shape[1] * self._site.pools.page_size
        layer_of_kind = {self._kind_of[layer.index]: layer for layer in self._site.layers}
        chain = ForwardOverrides(tree_mask=torch.ones(2, 2, dtype=torch.bool, device=where).tril())
        samples = [(min(HOPPER_TILE, longest), 0, NO_OVERRIDES), (2, 0, NO_OVERRIDES)]
        samples += [(1, 0, NO_OVERRIDES), (1, 1, NO_OVERRIDES)]
        if self._site.has_tree_masks:
            samples.append((2, 0, chain))
        for query_len, num_shared, overrides in samples:
            padding = _padding(query_len, where, kv_len=num_shared * self._site.pools.page_size)
            padding = dataclasses.replace(padding, shared_pages=num_shared)
            batch = ForwardBatch.init_new(padding, self._site.pools, overrides)
            lens = padding.len_bounds_cpu
            cascade = self._cascades.plan(batch, lens) if num_shared else NO_CASCADE
            attend = self.bind(batch, self._plan(batch, lens, cascade))
            for layer in layer_of_kind.values():
                shape = (query_len, layer.num_heads + layer.num_stored_heads, layer.head_dim)
                heads = torch.zeros(shape, dtype=self._site.dtype, device=where)
                attend(layer, AttentionInputs(heads))
        self._site.device.mark().synchronize()

    def _write_indices(self, batch: ForwardBatch, pages: Mapping[int, PageIndices]) -> None:
        pools, windows = self._site.pools, self._site.windows
        for group, own in pages.items():
            table, window = pools.page_tables[group], windows[group]
            own.write(batch, table, self._ops, window=window, page_size=pools.page_size)


def _pages(kv: LayerKv, layer: LayerSpec, page_size: int) -> tuple[Tensor, Tensor]:
    """The pools that a layer's kernel reads, by page."""
    if layer.value_dim is not None:
        return latent_pages(kv.keys, page_size, layer.value_dim)
    return _by_page(kv.keys, page_size), _by_page(kv.values, page_size)


def _by_page(pool: Tensor, page_size: int) -> Tensor:
    """[slots, kv_heads, head_dim] -> [pages, page_size, kv_heads, head_dim]"""
    return pool.view(-1, page_size, *pool.shape[1:])


def _padding(query_len: int, where: torch.device, *, kv_len: int) -> DeviceBatch:
    """query_len tokens of the padding row, behind kv_len earlier ones."""
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
    package: FlashInferPackage, site: AttentionSite, *, ops: CsrOps = KERNELS
) -> FlashInfer:
    """Raises AttentionUnavailable if the kernels cannot be compiled or run. A lack of memory is
    passed on, because it says nothing about the kernels."""
    check_version(package)
    check_kv_dtype(site.pools.device, site.pools.dtype)
    if any(layer.mask is Mask.NONE and layer.window is not None for layer in site.layers):
        raise AttentionUnavailable("has no windows in layers without a causal mask")
    check_latents(site, lambda: package.mla)
    try:
        with site.device.stream():
            backend = FlashInfer(package, site, ops=ops)
            backend.compile_kernels()
    except torch.OutOfMemoryError:
        raise
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
        head_dims=frozenset({64, 128, 256, HEAD_DIM}),
        masks=frozenset({Mask.CAUSAL, Mask.NONE}),
        latents=True,
        tree_masks=True,
        host_lens=True,
        can_capture=True,
        shared_pages=True,
    ),
    _build,
    make_sparse_ops,  # FlashInfer has no kernels for chosen keys
)
