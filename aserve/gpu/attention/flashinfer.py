"""Attention by FlashInfer's paged kernels: the default on CUDA.

A forward is planned once on the host, from exact lengths: one plan for all layers that are alike.
It knows no model. Written: the keys and values of the forward's own slots, and its own workspaces.

Source: https://docs.flashinfer.ai, BatchPrefillWithPagedKVCacheWrapper and
BatchDecodeWithPagedKVCacheWrapper, as of 0.6.
"""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import AttentionKind, AttentionUnavailable
from aserve.gpu.attention.capabilities import AttentionSite, Capabilities
from aserve.gpu.attention.page_lists import PageLists, gather_pages, list_pages
from aserve.gpu.device.base import Device, Event
from aserve.gpu.device_batch import DeviceBatch
from aserve.gpu.forward_batch import ForwardBatch
from aserve.gpu.models.attend import Attend
from aserve.gpu.models.layer_spec import LayerSpec
from aserve.gpu.sections import HostSections

LEAST_VERSION = (0, 6)
LAYOUT = "NHD"  # [pages, page_size, kv_heads, head_dim], as our pools are
# For parts of rows that are computed apart. Of a prefill: query heads per KV head * thread blocks
# at once (two on each of 132 multiprocessors) * tile of 128 queries * head_dim * 4 bytes; enough
# for 8 query heads of 256 or 16 of 128.
FLOAT_BYTES = 384 << 20
FP8 = torch.float8_e4m3fn
# So many query heads of one KV head fill the tiles of matrix instructions; below it plain
# instructions read keys and values as fast, and are planned in less time.
MIN_TENSOR_CORE_HEADS = 4
BUILD_ERRORS = (RuntimeError, OSError, ValueError, subprocess.SubprocessError)


class Wrapper(Protocol):
    @property
    def plan(self) -> Callable[..., None]: ...

    @property
    def run(self) -> Callable[..., Tensor]: ...


class FlashInferModule(Protocol):
    """What is used of the package, which has no types of its own where it is not installed."""

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]: ...

    @property
    def BatchDecodeWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]: ...

    @property
    def __version__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Problem:
    """What one plan serves: layers of a group that differ in nothing that a kernel sees."""

    group: int
    layer: LayerSpec  # any of them, as number 0


@dataclass(frozen=True, slots=True)
class FlashPlan:
    wrappers: dict[Problem, Wrapper]


class Slot:
    """The workspaces of one plan: a wrapper copies from its own pinned memory while the device is
    behind, so it plans again only after `done`."""

    __slots__ = ("done", "host", "wrappers")

    def __init__(self) -> None:
        self.done: Event | None = None
        self.host = torch.empty(0, dtype=torch.int32)
        self.wrappers: dict[tuple[Problem, bool], Wrapper] = {}

    def room(self, num_words: int, device: Device) -> Tensor:
        if len(self.host) < num_words:
            self.host = device.host_buffer(2 * num_words)
        return self.host


class FlashInfer:
    """Written by plan: the ring of slots, in turn."""

    __slots__ = ("_float_workspace", "_module", "_next", "_pages", "_problems", "_site", "_slots")
    static_plans = None

    def __init__(self, module: FlashInferModule, site: AttentionSite) -> None:
        pools = site.pools
        self._module = module
        self._site = site
        self._problems = {
            layer.index: Problem(pools.layers[layer.index].group, _as_kind(layer))
            for layer in site.layers
        }
        self._pages = {
            index: (_by_page(kv.keys, pools.page_size), _by_page(kv.values, pools.page_size))
            for index, kv in pools.layers.items()
        }
        self._float_workspace = torch.empty(FLOAT_BYTES, dtype=torch.uint8, device=pools.device)
        self._slots = tuple(Slot() for _ in range(site.num_in_flight + 1))
        self._next = 0

    def plan(self, batch: ForwardBatch) -> object:
        if batch.lens_cpu is None:
            raise BugError(f"step {batch.iteration}: FlashInfer plans from exact lengths only")
        if not batch.num_rows:
            return FlashPlan({})
        slot = self._take_slot()
        lists = [
            list_pages(
                batch.lens_cpu, batch.spans_cpu, window=window, page_size=self._site.pools.page_size
            )
            for window in self._site.windows
        ]
        arrays = self._write(slot, batch, lists)
        is_decode = batch.num_tokens == batch.num_rows
        wrappers: dict[Problem, Wrapper] = {}
        for problem in dict.fromkeys(self._problems.values()):
            wrappers[problem] = wrapper = self._wrapper(slot, problem, is_decode=is_decode)
            self._plan_one(wrapper, problem, arrays, is_decode=is_decode)
        slot.done = self._site.device.mark()
        return FlashPlan(wrappers)

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        if not isinstance(plan, FlashPlan):
            raise BugError(f"step {batch.iteration}: a plan of another backend: {plan!r}")

        def attend(layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = self._site.pools.layers[layer.index]
            kv.store(batch.slots[kv.group], k, v)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if not len(q):
                return out
            wrapper = plan.wrappers[self._problems[layer.index]]
            k_scale, v_scale = kv.scales
            scales = {} if kv.scales == (1.0, 1.0) else {"k_scale": k_scale, "v_scale": v_scale}
            return wrapper.run(q.contiguous(), self._pages[layer.index], out=out, **scales)

        return attend

    def try_out(self) -> None:
        """A prefill and a decode of the padding row through one layer of each kind: compiles what
        is not compiled yet, which takes minutes."""
        of_kind = {self._problems[layer.index]: layer for layer in self._site.layers}
        for span in (2, 1):
            batch = ForwardBatch.init_new(_padding(span, self._site.pools.device), self._site.pools)
            attend = self.bind(batch, self.plan(batch))
            for layer in of_kind.values():
                heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
                sizes = ((span, num, layer.head_dim) for num in heads)
                where = self._site.pools.device
                q, k, v = (torch.zeros(s, dtype=self._site.dtype, device=where) for s in sizes)
                attend(layer, q, k, v)
        self._site.device.mark().synchronize()

    def _take_slot(self) -> Slot:
        """As many steps as may be in flight have another one, so this waits for nothing."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.done is not None:
            slot.done.synchronize()
        return slot

    def _write(self, slot: Slot, batch: ForwardBatch, lists: list[PageLists]) -> Arrays:
        """All arrays of a plan, in pinned memory; the pages are gathered on the device."""
        sections = HostSections()
        query_starts = np.zeros(batch.num_rows + 1, np.int32)
        np.cumsum(batch.spans_cpu, out=query_starts[1:])
        sections.add("query_starts", query_starts)
        for group, listed in enumerate(lists):
            sections.add(f"starts{group}", listed.starts)
            sections.add(f"firsts{group}", listed.firsts)
            sections.add(f"last_lens{group}", listed.last_lens)
        host = slot.room(sections.num_words, self._site.device)
        places = sections.write(host.numpy())
        words = self._site.device.stage(host[: sections.num_words])
        tables = self._site.pools.page_tables
        pages = tuple(
            gather_pages(
                tables[group],
                batch.rows,
                starts=words[places[f"starts{group}"]],
                firsts=words[places[f"firsts{group}"]],
                num_pages=listed.num_pages,
            )
            for group, listed in enumerate(lists)
        )
        return Arrays({name: host[place] for name, place in places.items()}, pages)

    def _wrapper(self, slot: Slot, problem: Problem, *, is_decode: bool) -> Wrapper:
        key = (problem, is_decode)
        if key not in slot.wrappers:
            slot.wrappers[key] = self._new_wrapper(problem, is_decode=is_decode)
        return slot.wrappers[key]

    def _new_wrapper(self, problem: Problem, *, is_decode: bool) -> Wrapper:
        if not is_decode:
            make = self._module.BatchPrefillWithPagedKVCacheWrapper
            return make(self._float_workspace, LAYOUT)
        heads = problem.layer.num_heads // problem.layer.num_kv_heads
        is_narrow = self._site.pools.dtype == FP8
        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace,
            LAYOUT,
            use_tensor_cores=is_narrow or heads >= MIN_TENSOR_CORE_HEADS,
        )

    def _plan_one(
        self, wrapper: Wrapper, problem: Problem, arrays: Arrays, *, is_decode: bool
    ) -> None:
        layer = problem.layer
        paged = (
            arrays.host[f"starts{problem.group}"],
            arrays.pages[problem.group],
            arrays.host[f"last_lens{problem.group}"],
        )
        shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim, self._site.pools.page_size)
        details: dict[str, object] = {
            "sm_scale": layer.scale,
            "window_left": -1 if layer.window is None else layer.window - 1,
            "logits_soft_cap": layer.softcap,
            "q_data_type": self._site.dtype,
            "kv_data_type": self._site.pools.dtype,
        }
        if is_decode:
            wrapper.plan(*paged, *shape, **details)
        else:
            wrapper.plan(arrays.host["query_starts"], *paged, *shape, causal=True, **details)


@dataclass(frozen=True, slots=True)
class Arrays:
    """`host`: int32 in pinned memory, by name; `pages`: int32 on the device, per layer group."""

    host: dict[str, Tensor]
    pages: tuple[Tensor, ...]


def _as_kind(layer: LayerSpec) -> LayerSpec:
    return msgspec.structs.replace(layer, index=0)


def _by_page(pool: Tensor, page_size: int) -> Tensor:
    """[slots, kv_heads, head_dim] -> [pages, page_size, kv_heads, head_dim]"""
    return pool.view(-1, page_size, *pool.shape[1:])


def _padding(span: int, where: torch.device) -> DeviceBatch:
    """Tokens of row 0, which has no pages and is nobody's."""
    zeros = torch.zeros(span, dtype=torch.int64, device=where)
    spans_cpu = np.array([span], np.int32)
    return DeviceBatch(
        iteration=0,
        rows=zeros[:1],
        spans=zeros[:1] + span,
        kv_lens=zeros[:1],
        input_ids=zeros,
        owners=zeros,
        offsets=torch.arange(span, device=where),
        spans_cpu=spans_cpu,
        len_bounds_cpu=spans_cpu,
        is_exact=True,
    )


def _build(site: AttentionSite) -> FlashInfer:
    module = importlib.import_module("flashinfer")
    return build_flashinfer(cast(FlashInferModule, module), site)


def build_flashinfer(module: FlashInferModule, site: AttentionSite) -> FlashInfer:
    """Raises AttentionUnavailable where its kernels cannot be compiled or run."""
    version = tuple(int(part) for part in re.findall(r"\d+", module.__version__)[:2])
    if version < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise AttentionUnavailable(f"is version {module.__version__}, and {least} is needed")
    backend = FlashInfer(module, site)
    try:
        backend.try_out()
    except BUILD_ERRORS as error:
        raise AttentionUnavailable(f"cannot be compiled or run: {_first_line(error)}") from error
    return backend


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
    ),
    _build,
)
