"""A package like FlashInfer for tests: its wrappers record how they are planned, and compute in
plain torch from nothing but the arrays and numbers that the plan was given.

As on a device that is behind, arrays in host memory are read when the kernel runs, not when it is
planned: what is written there in between is what the kernel sees.

To plan, a wrapper asks torch for what FlashInfer 0.7.2 asks it for, and in the end its compiled
planner, once. That reads arrays of the host at once, and what it makes of them goes through pinned
memory of the wrapper to the device, where a captured kernel finds its work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.attention.flashinfer.page_indices import CsrOps
from aserve_kernels.kv_indices import kv_indices_ref
from aserve_kernels.kv_indptr import kv_indptr_ref
from aserve_kernels.packed_mask import packed_mask_ref

INT_BYTES = 1 << 14
# For the backend beside it: how pages are listed where no kernel of Triton runs.
LISTED_IN_TORCH = CsrOps(kv_indptr_ref, kv_indices_ref, packed_mask_ref)


@dataclass
class Recorded:
    """Of one call of plan; arrays as they were given."""

    cu_query_lens: Tensor | None  # None: one query each
    starts: Tensor
    pages: Tensor
    last_lens: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window_left: int
    softcap: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    causal: bool = True
    uniform_q_len: int | None = None  # of every row of a captured forward, as far as it was told


@dataclass
class Static:
    """What the kernels of a captured forward read: buffers that stay where they are."""

    starts: Tensor
    pages: Tensor
    last_lens: Tensor
    width: int = 1


@dataclass
class Planner:
    """Compiled for all wrappers of a kind. Of its arguments, which are in an order of its own, it
    wants the starts as number `starts`: each row's work is so many pages."""

    starts: int
    num_plans: int = 0

    def plan(self, *args: object) -> list[int]:
        _workspace, int_workspace, pinned, *_ = args
        starts = args[self.starts]
        assert isinstance(int_workspace, Tensor)
        assert isinstance(pinned, Tensor)
        assert isinstance(starts, Tensor)
        self.num_plans += 1
        pinned.numpy()[: len(starts)] = starts.numpy()
        room = int_workspace.view(torch.int32)[: len(starts)]
        room.copy_(pinned[: len(starts)], non_blocking=True)
        return [0, len(starts)]


class FakeJit:
    """flashinfer.jit, and its core. A module is compiled before it is loaded, and loaded once."""

    def __init__(self) -> None:
        self.builds: list[list[str]] = []  # the modules of each build, in order
        self.loaded: list[str] = []
        self.JitSpec: Any = type("JitSpec", (FakeModule,), {"jit": self})

    @property
    def core(self) -> Any:
        return self

    def build_jit_specs(self, specs: list[Any]) -> None:
        self.builds.append([spec.name for spec in specs])

    def load(self, name: str) -> None:
        if name not in self.loaded:
            self.JitSpec(name).build_and_load()


class FakeModule:
    """A JitSpec."""

    jit: FakeJit

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def is_compiled(self) -> bool:
        return any(self.name in build for build in self.jit.builds)

    def build_and_load(self) -> None:
        if not self.is_compiled:
            self.jit.build_jit_specs([self])
        self.jit.loaded.append(self.name)


@dataclass
class FakeWrapper:
    """What both kinds have. `plans` is shared by all wrappers of a package."""

    workspace: Tensor
    layout: str
    plans: list[Recorded]
    pinned_memory: Callable[[int], Tensor]
    planner: Planner
    jit: FakeJit
    static: Static | None = None
    planned: Recorded | None = None
    backend: str = "auto"
    int_workspace: Tensor = field(init=False)
    pinned: Tensor = field(init=False)
    _cached_module: Planner = field(init=False)  # once it has planned
    _custom_mask_buf: Tensor | None = None
    _mask_indptr_buf: Tensor | None = None

    def __post_init__(self) -> None:
        room = torch.zeros(INT_BYTES, dtype=torch.uint8, device=self.workspace.device)
        self.reset_workspace_buffer(self.workspace, room)

    @property
    def mask(self) -> Bits | None:
        if self._custom_mask_buf is None or self._mask_indptr_buf is None:
            return None
        return Bits(self._custom_mask_buf, self._mask_indptr_buf)

    def reset_workspace_buffer(self, workspace: Tensor, int_workspace: Tensor) -> None:
        assert workspace is self.workspace
        self.int_workspace = int_workspace
        self.pinned = self.pinned_memory(int_workspace.nbytes // 4)

    def keep(self, recorded: Recorded) -> None:
        for array in (recorded.cu_query_lens, recorded.starts, recorded.last_lens):
            assert array is None or (array.dtype, array.device.type) == (torch.int32, "cpu")
        assert recorded.pages.dtype == torch.int32
        assert len(recorded.starts) == len(recorded.last_lens) + 1
        assert recorded.num_heads % recorded.num_kv_heads == 0
        self.planned = recorded
        self.plans.append(recorded)
        num_pages = int(recorded.starts.numpy()[-1])
        if self.static is None:
            assert recorded.pages.shape == (num_pages,)
            return
        assert num_pages <= len(self.static.pages)
        self.static.starts.copy_(recorded.starts, non_blocking=True)
        self.static.last_lens.copy_(recorded.last_lens, non_blocking=True)
        self.static.pages[: len(recorded.pages)].copy_(recorded.pages, non_blocking=True)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        plan = self.planned
        assert plan is not None, "run before plan"
        assert q.stride(2) == 1
        shape = (plan.page_size, plan.num_kv_heads, plan.head_dim)
        for pool in paged_kv_cache:
            assert (pool.shape[1:], pool.dtype) == (shape, plan.kv_dtype)
        assert (q.shape[1:], q.dtype) == ((plan.num_heads, plan.head_dim), plan.q_dtype)
        keys, values = paged_kv_cache
        out = torch.empty_like(q) if out is None else out
        scaled = q * (plan.scale * (k_scale or 1.0))
        if self.static is not None:
            work = self.int_workspace.view(torch.int32)[: len(self.static.starts)]
            _run_static(
                scaled, keys, values, plan, static=self.static, work=work, out=out, mask=self.mask
            )
        else:
            sums = _run_rows(scaled, keys, values, plan, out=out, mask=self.mask)
        out.mul_(v_scale or 1.0)
        return (out, sums) if return_lse else out


@dataclass
class Bits:
    """A custom mask: that of a row begins at the byte that `starts` says."""

    values: Tensor
    starts: Tensor

    def of(self, row: int, num_queries: int, num_keys: int, kv_len: int | Tensor) -> Tensor:
        """bool [queries, keys]; keys from `kv_len` on are not seen."""
        assert (self.values.dtype, self.starts.dtype) == (torch.uint8, torch.int32)
        device = self.values.device
        queries, keys = (
            torch.arange(num_queries, device=device),
            torch.arange(num_keys, device=device),
        )
        place = queries[:, None] * kv_len + keys
        byte = self.values[(self.starts[row] + place // 8).clamp(max=len(self.values) - 1).long()]
        return (byte >> (place % 8) & 1).bool() & (keys < kv_len)


def _run_rows(
    q: Tensor, keys: Tensor, values: Tensor, plan: Recorded, *, out: Tensor, mask: Bits | None
) -> Tensor:
    """-> the logarithm of each query's sum of exponents, [queries, heads]."""
    sums = q.new_empty(q.shape[:2])
    cu_query_lens = plan.cu_query_lens
    if cu_query_lens is None:
        cu_query_lens = torch.arange(len(plan.last_lens) + 1, device="cpu")
    assert len(q) == int(cu_query_lens[-1])
    for row, last_len in enumerate(plan.last_lens.tolist()):
        part = slice(int(cu_query_lens[row]), int(cu_query_lens[row + 1]))
        pages = plan.pages[int(plan.starts[row]) : int(plan.starts[row + 1])].long()
        kv_len = (len(pages) - 1) * plan.page_size + last_len
        k, v = keys[pages], values[pages]
        num_keys = len(pages) * plan.page_size
        seen = None if mask is None else mask.of(row, len(q[part]), num_keys, kv_len)
        out[part], sums[part] = _attend(q[part], k, v, plan, kv_len=kv_len, seen=seen)
    return sums


def _run_static(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Recorded,
    *,
    static: Static,
    work: Tensor,
    out: Tensor,
    mask: Bits | None,
) -> None:
    """Nothing but operators on tensors whose shapes no value decides: it may be captured. `work`:
    the starts as they were planned."""
    num_pages = work.diff()
    kv_lens = (num_pages - 1) * plan.page_size + static.last_lens
    columns = torch.arange(len(static.pages), device=q.device)
    for row in range(len(static.last_lens)):
        part = slice(row * static.width, (row + 1) * static.width)
        numbers = torch.minimum(columns, num_pages[row] - 1)
        pages = static.pages[static.starts[row] + numbers].long()
        k, v = keys[pages], values[pages]
        num_keys = len(pages) * plan.page_size
        seen = None if mask is None else mask.of(row, static.width, num_keys, kv_lens[row])
        out[part], _ = _attend(q[part], k, v, plan, kv_len=kv_lens[row], seen=seen)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Recorded, *, kv_len: int | Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q: [queries, heads, head_dim]. k, v: [pages, page_size, kv_heads, head_dim], of whose tokens
    `kv_len` are there."""
    groups = plan.num_heads // plan.num_kv_heads
    k, v = (x.flatten(0, 1).to(q.dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k)
    if plan.softcap > 0:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    queries, tokens = (torch.arange(len(x), device=q.device) for x in (q, k))
    distance = (kv_len - len(q) + queries)[:, None] - tokens
    is_seen = distance >= 0 if plan.causal else (tokens < kv_len).expand_as(distance)
    if seen is not None:
        is_seen = seen
    if plan.window_left >= 0:
        is_seen = is_seen & (distance <= plan.window_left)
    scores = torch.where(is_seen, scores, -torch.inf)
    v = torch.where(is_seen.any(dim=0)[:, None, None], v, 0.0)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v), scores.logsumexp(dim=-1).T


@dataclass
class FakePrefill(FakeWrapper):
    query_starts_buffer: Tensor | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        kernels = "fa3" if self.backend == "auto" else self.backend
        self.jit.load(f"prefill {kernels}{' window' * (window_left >= 0)}")
        if self.static is None:
            self._custom_mask_buf = self._mask_indptr_buf = None
        if self.static is not None:
            assert self.query_starts_buffer is not None
            self.query_starts_buffer.copy_(qo_indptr, non_blocking=True)
            self.static.width = int(qo_indptr.numpy()[1])
        self.keep(
            Recorded(
                qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                num_qo_heads, num_kv_heads, head_dim_qk, page_size,
                sm_scale, window_left, logits_soft_cap or 0.0, q_data_type, kv_data_type,
                causal=causal, uniform_q_len=uniform_q_len,
            )
        )  # fmt: skip
        lens = _seq_lens(paged_kv_indptr, paged_kv_last_page_len, page_size)
        self._cached_module = self.planner
        self.planner.plan(
            self.workspace, self.int_workspace, self.pinned, qo_indptr, paged_kv_indptr, lens,
            len(lens), num_qo_heads, num_kv_heads, page_size, self.static is not None, window_left,
        )  # fmt: skip


@dataclass
class FakeDecode(FakeWrapper):
    use_tensor_cores: bool = False

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        kernels = "prefill fa2" if self.use_tensor_cores else "decode"
        self.jit.load(f"{kernels}{' window' * (window_left >= 0)}")
        self.keep(
            Recorded(
                None, indptr, indices, last_page_len,
                num_qo_heads, num_kv_heads, head_dim, page_size,
                sm_scale, window_left, logits_soft_cap or 0.0, q_data_type, kv_data_type,
            )
        )  # fmt: skip
        lens = _seq_lens(indptr, last_page_len, page_size)
        if seq_lens is not None:
            assert seq_lens.tolist() == lens.tolist()
            lens = seq_lens.cpu()
        self._cached_module = self.planner
        workspaces = self.workspace, self.int_workspace, self.pinned
        sizes = len(lens), num_qo_heads, num_kv_heads, page_size, self.static is not None
        if self.use_tensor_cores:
            queries = torch.arange(len(indptr), device="cpu")
            self.planner.plan(*workspaces, queries, indptr, lens, *sizes, head_dim, window_left)
        else:
            kinds = torch.empty(0, dtype=q_data_type), torch.empty(0, dtype=kv_data_type)
            self.planner.plan(*workspaces, indptr, *sizes, window_left, head_dim, *kinds)


@dataclass
class LatentPlanner(Planner):
    """Compiled for wrappers of latents: starts and lengths reach the kernel in its workspace."""

    def plan(self, *args: object) -> list[int]:
        _workspace, int_workspace, pinned, _cu_query_lens, starts, lens, *_ = args
        assert isinstance(int_workspace, Tensor)
        assert isinstance(pinned, Tensor)
        assert isinstance(starts, Tensor)
        assert isinstance(lens, Tensor)
        self.num_plans += 1
        size = len(starts) + len(lens)
        words = pinned.view(torch.int32)[:size]
        words.numpy()[:] = np.concatenate((starts.numpy(), lens.numpy()))
        int_workspace.view(torch.int32)[:size].copy_(words, non_blocking=True)
        return [0, size]


@dataclass
class FakeMla:
    """The wrapper of latents."""

    workspace: Tensor
    plans: list[Recorded]
    planner: LatentPlanner
    jit: FakeJit
    pages: Tensor | None = None  # the buffer of a captured forward
    planned: Recorded | None = None
    _cached_module: LatentPlanner = field(init=False)  # once it has planned
    _int_workspace_buffer: Tensor = field(init=False)
    _pin_memory_int_workspace_buffer: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.workspace.device
        self._int_workspace_buffer = torch.zeros(INT_BYTES, dtype=torch.uint8, device=device)
        self._pin_memory_int_workspace_buffer = torch.zeros(INT_BYTES, dtype=torch.uint8)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self.jit.load("mla")
        for array in (qo_indptr, kv_indptr, kv_len_arr):
            assert (array.dtype, array.device.type) == (torch.int32, "cpu")
        assert len(kv_indptr) == len(qo_indptr) == len(kv_len_arr) + 1
        assert self.pages is not None or len(kv_indices) == int(kv_indptr[-1])
        assert (-(-kv_len_arr // page_size)).tolist() == kv_indptr.diff().tolist()
        self.planned = Recorded(
            qo_indptr.clone(), kv_indptr.clone(), kv_indices, (kv_len_arr - 1) % page_size + 1,
            num_heads, 1, head_dim_ckv + head_dim_kpe, page_size,
            sm_scale, -1, 0.0, q_data_type, kv_data_type, causal=causal,
        )  # fmt: skip
        self.plans.append(self.planned)
        self._cached_module = self.planner
        self.planner.plan(
            self.workspace, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer,
            qo_indptr, kv_indptr, kv_len_arr, num_heads, head_dim_ckv, causal,
        )  # fmt: skip

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *, out: Tensor
    ) -> Tensor:
        plan = self.planned
        assert plan is not None, "run before plan"
        assert (out.shape, ckv_cache.dtype) == (q_nope.shape, plan.kv_dtype)
        q = torch.cat((q_nope, q_pe), dim=-1) * plan.scale
        values = ckv_cache[:, :, None]
        keys = torch.cat((values, kpe_cache[:, :, None]), dim=-1)
        assert q.shape[1:] == (plan.num_heads, plan.head_dim)
        if self.pages is None:
            _run_rows(q, keys, values, plan, out=out, mask=None)
            return out
        num_rows = len(plan.last_lens)
        work = self._int_workspace_buffer.view(torch.int32)[: 2 * num_rows + 1]
        starts, lens = work.split((num_rows + 1, num_rows))
        last_lens = (lens - 1) % plan.page_size + 1
        static = Static(starts, self.pages, last_lens, len(q) // num_rows)
        _run_static(q, keys, values, plan, static=static, work=starts, out=out, mask=None)
        return out


def _seq_lens(starts: Tensor, last_lens: Tensor, page_size: int) -> Tensor:
    return torch.clamp(starts[1:] - starts[:-1] - 1, min=0) * page_size + last_lens


def plain_memory(num_words: int) -> Tensor:
    return torch.empty(num_words, dtype=torch.int32)


@dataclass
class FakeFlashInfer:
    """`plans`: all calls of plan, in order. `planners`: of what reads whole tiles, and of what does
    not."""

    plans: list[Recorded] = field(default_factory=list)
    wrappers: list[FakeWrapper] = field(default_factory=list)
    pinned_memory: Callable[[int], Tensor] = plain_memory
    planners: tuple[Planner, Planner] = field(default_factory=lambda: (Planner(4), Planner(3)))
    latent_planner: LatentPlanner = field(default_factory=lambda: LatentPlanner(4))
    jit: FakeJit = field(default_factory=FakeJit)
    __version__: str = "0.7.2"

    @property
    def num_plans(self) -> int:
        return sum(planner.num_plans for planner in (*self.planners, self.latent_planner))

    @property
    def mla(self) -> FakeFlashInfer:
        return self

    def BatchMLAPagedAttentionWrapper(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> FakeMla:
        buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all((buffer is not None) == use_cuda_graph for buffer in buffers)
        return FakeMla(
            float_workspace_buffer, self.plans, self.latent_planner, self.jit, kv_indices
        )

    def BatchPrefillWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> FakePrefill:
        made = self._prefill(float_workspace_buffer, kv_layout)
        made.backend = backend
        made.static = _static(
            use_cuda_graph, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        )
        made.query_starts_buffer = qo_indptr_buf
        self.wrappers.append(made)
        return made

    def merge_state_in_place(self, v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
        self.jit.load("cascade")
        own, other = torch.stack((s, s_other)).softmax(dim=0)[..., None]
        v.copy_(v * own + v_other * other)
        s.copy_(torch.logaddexp(s, s_other))

    def _prefill(self, workspace: Tensor, layout: str) -> FakePrefill:
        return FakePrefill(
            workspace, layout, self.plans, self.pinned_memory, self.planners[0], self.jit
        )

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> FakeDecode:
        planner = self.planners[0 if use_tensor_cores else 1]
        made = FakeDecode(
            float_workspace_buffer, kv_layout, self.plans, self.pinned_memory, planner, self.jit
        )
        made.backend = backend
        made.use_tensor_cores = use_tensor_cores
        made.static = _static(
            use_cuda_graph,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        self.wrappers.append(made)
        return made


def _static(
    is_static: bool, starts: Tensor | None, pages: Tensor | None, last_lens: Tensor | None
) -> Static | None:
    if not is_static:
        return None
    assert starts is not None
    assert pages is not None
    assert last_lens is not None
    return Static(starts, pages, last_lens)
