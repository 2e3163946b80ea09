"""A package like FlashInfer for tests: its wrappers record how they are planned, and compute in
plain torch from nothing but the arrays and numbers that the plan was given.

As on a device that is behind, arrays in host memory are read when the kernel runs, not when it is
planned: what is written there in between is what the kernel sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Recorded:
    """Of one call of plan; arrays as they were given."""

    query_starts: Tensor | None  # None: one query each
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


@dataclass
class FakeWrapper:
    """What both kinds have. `plans` is shared by all wrappers of a module."""

    workspace: Tensor
    layout: str
    plans: list[Recorded]
    planned: Recorded | None = None

    def keep(self, recorded: Recorded) -> None:
        for array in (recorded.query_starts, recorded.starts, recorded.last_lens):
            assert array is None or (array.dtype, array.device.type) == (torch.int32, "cpu")
        assert recorded.pages.dtype == torch.int32
        assert recorded.pages.shape == (int(recorded.starts[-1]),)
        assert len(recorded.starts) == len(recorded.last_lens) + 1
        assert recorded.num_heads % recorded.num_kv_heads == 0
        self.planned = recorded
        self.plans.append(recorded)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> Tensor:
        plan = self.planned
        assert plan is not None, "run before plan"
        assert q.is_contiguous()
        shape = (plan.page_size, plan.num_kv_heads, plan.head_dim)
        for pool in paged_kv_cache:
            assert (pool.shape[1:], pool.dtype) == (shape, plan.kv_dtype)
        assert (q.shape[1:], q.dtype) == ((plan.num_heads, plan.head_dim), plan.q_dtype)
        query_starts = plan.query_starts
        if query_starts is None:
            query_starts = torch.arange(len(plan.last_lens) + 1)
        assert len(q) == int(query_starts[-1])
        keys, values = (pool.to(q.dtype) for pool in paged_kv_cache)
        for row in range(len(plan.last_lens)):
            part = slice(int(query_starts[row]), int(query_starts[row + 1]))
            own = plan.pages[int(plan.starts[row]) : int(plan.starts[row + 1])].long()
            kv_len = (len(own) - 1) * plan.page_size + int(plan.last_lens[row])
            k, v = (pool[own].flatten(0, 1)[:kv_len] for pool in (keys, values))
            scaled = q[part] * (plan.scale * (k_scale or 1.0))
            out[part] = _attend(scaled, k, v, plan) * (v_scale or 1.0)
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: Recorded) -> Tensor:
    groups = plan.num_heads // plan.num_kv_heads
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k)
    if plan.softcap > 0:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    is_seen = distance >= 0
    if plan.window_left >= 0:
        is_seen &= distance <= plan.window_left
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class FakePrefill(FakeWrapper):
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
    ) -> None:
        assert causal
        self.keep(
            Recorded(
                qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                num_qo_heads, num_kv_heads, head_dim_qk, page_size,
                sm_scale, window_left, logits_soft_cap or 0.0, q_data_type, kv_data_type,
            )
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
    ) -> None:
        self.keep(
            Recorded(
                None, indptr, indices, last_page_len,
                num_qo_heads, num_kv_heads, head_dim, page_size,
                sm_scale, window_left, logits_soft_cap or 0.0, q_data_type, kv_data_type,
            )
        )  # fmt: skip


@dataclass
class FakeFlashInfer:
    """`plans`: all calls of plan, in order."""

    plans: list[Recorded] = field(default_factory=list)
    wrappers: list[FakeWrapper] = field(default_factory=list)
    __version__: str = "0.6.3"

    def BatchPrefillWithPagedKVCacheWrapper(  # the package's name
        self, float_workspace_buffer: Tensor, kv_layout: str
    ) -> FakePrefill:
        made = FakePrefill(float_workspace_buffer, kv_layout, self.plans)
        self.wrappers.append(made)
        return made

    def BatchDecodeWithPagedKVCacheWrapper(  # the package's name
        self, float_workspace_buffer: Tensor, kv_layout: str, *, use_tensor_cores: bool = False
    ) -> FakeDecode:
        made = FakeDecode(
            float_workspace_buffer, kv_layout, self.plans, use_tensor_cores=use_tensor_cores
        )
        self.wrappers.append(made)
        return made
