"""A stand-in for the library deep_ep, whose ranks are threads of one process.

It has the arguments and results of `deep_ep.Buffer`, and is as strict as the kernels are: results
are garbage until their event or hook was waited for, rows that are not filled are NaN, a result of
the low-latency mode is overwritten by the second one after it, and the buffers of that mode must
be clean. All ranks make the same calls in the same order.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 10.0
RDMA_BYTES = 64


class Meeting:
    """Where the ranks leave what they send, by the number of the call. `called` counts the calls of
    all ranks by name."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._left: defaultdict[int, dict[int, tuple[str, Any]]] = defaultdict(dict)
        self._changed = threading.Condition()
        self.called: defaultdict[str, int] = defaultdict(int)

    def exchange(self, rank: int, number: int, kind: str, own: Any) -> list[Any]:
        with self._changed:
            left = self._left[number]
            left[rank] = kind, own
            self.called[kind] += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(left) == self.num_ranks, PATIENCE_S)
        assert {each[0] for each in left.values()} == {kind}, "the ranks' calls differ"
        return [left[other][1] for other in range(self.num_ranks)]


@dataclass(frozen=True, slots=True)
class Event:
    current_stream_wait: Callable[[], None]


class Library:
    """What `import deep_ep` gives. Its sums are multiplied by `factor`; `refuses` says for which
    ranks a buffer cannot be made."""

    def __init__(
        self, num_ranks: int, *, factor: float = 1.0, refuses: tuple[int, ...] = ()
    ) -> None:
        self.meeting = Meeting(num_ranks)
        self.factor = factor
        self.refuses = refuses
        self.Buffer = type("Buffer", (Buffer,), {"library": self})


class Buffer:
    library: Library

    def __init__(
        self,
        group: None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        *,
        comm: Any,
    ) -> None:
        assert group is None
        assert num_nvl_bytes > 0
        assert num_rdma_bytes >= RDMA_BYTES * (1 + low_latency_mode)
        self.rank, self.num_ranks = comm.Get_rank(), comm.Get_size()
        for own in (self.rank, bytearray(b"handle"), None):
            every = comm.allgather(own)
            assert [type(each) for each in every] == [type(own)] * self.num_ranks
        if self.rank in self.library.refuses:
            raise RuntimeError("no NVLink")
        self._num_calls = 0
        self._num_own = num_qps_per_rank  # as the low-latency mode requires
        self._is_low_latency = low_latency_mode
        self._is_dirty = False
        self._recent: list[Tensor] = []  # results of the low-latency mode

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> SimpleNamespace:
        assert num_ranks in (2, 4), f"Unsupported number of EP ranks: {num_ranks}"
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row_bytes, _ranks: row_bytes,
            get_rdma_buffer_size_hint=lambda _row_bytes, _ranks: RDMA_BYTES,
        )

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        most: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        assert min(most, hidden, num_ranks, num_experts) > 0
        return 2 * RDMA_BYTES

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert num_experts == self._num_own * self.num_ranks
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        ranks = topk_idx.div(self._num_own, rounding_mode="floor")
        is_in_rank = torch.stack([(ranks == rank).any(1) for rank in range(self.num_ranks)], 1)
        per_expert = torch.stack([(topk_idx == e).sum() for e in range(num_experts)])
        return is_in_rank.sum(0).int(), None, per_expert.int(), is_in_rank, None

    def dispatch(
        self,
        x: Tensor,
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        async_finish: bool,
    ) -> tuple[Any, ...]:
        self._check_rows(x, topk_weights)
        assert async_finish
        assert num_tokens_per_rdma_rank is None
        assert num_tokens_per_expert.sum() == (topk_idx >= 0).sum()
        self._is_dirty = True
        parts = []
        for rank in range(self.num_ranks):
            tokens = is_token_in_rank[:, rank].nonzero().flatten()
            assert len(tokens) == num_tokens_per_rank[rank]
            local = topk_idx[tokens] - rank * self._num_own
            is_own = (local >= 0) & (local < self._num_own)
            weights = topk_weights[tokens].where(is_own, 0.0)
            parts.append((x[tokens], local.where(is_own, -1), weights))
        received = self._received("dispatch", parts)
        arrived = [torch.cat(each) for each in zip(*received, strict=True)]
        results = [torch.full_like(each, 10**6) for each in arrived]
        counts = [int((arrived[1] == own).sum()) for own in range(self._num_own)]
        handle = is_token_in_rank, [len(part[0]) for part in received]
        return *results, counts, handle, _filling(results, arrived)

    def combine(self, x: Tensor, handle: Any, *, async_finish: bool) -> tuple[Any, ...]:
        assert async_finish
        self._check_rows(x)
        is_token_in_rank, sizes = handle
        received = self._received("combine", list(x.split(sizes)))
        sums = torch.zeros(len(is_token_in_rank), x.shape[1])
        for rank, part in enumerate(received):
            sums[is_token_in_rank[:, rank]] += part.float()
        arrived = (sums * self.library.factor).to(x.dtype)
        result = torch.full_like(arrived, torch.nan)
        return result, None, _filling([result], [arrived])

    def clean_low_latency_buffer(self, _most: int, _hidden: int, _num_experts: int) -> None:
        self._received("clean", [None] * self.num_ranks)
        self._is_dirty = False

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        most: int,
        num_experts: int,
        *,
        use_fp8: bool,
        return_recv_hook: bool,
    ) -> tuple[Any, ...]:
        assert not self._is_dirty
        assert self._is_low_latency
        assert len(x) <= most
        assert (use_fp8, return_recv_hook) == (False, True)
        assert topk_idx.dtype == torch.int64
        assert num_experts == self._num_own * self.num_ranks
        self._check_rows(x)
        first = self.rank * self._num_own
        every = self._received("low-latency dispatch", [(x, topk_idx)] * self.num_ranks)
        arrived = x.new_full((self._num_own, self.num_ranks * most, x.shape[1]), torch.nan)
        counts = torch.zeros(self._num_own, dtype=torch.int32)
        places = []  # of each rank's tokens in the rows of each local expert
        for rows, experts in every:
            for own in range(self._num_own):
                tokens = (experts == first + own).any(1).nonzero().flatten()
                start = int(counts[own])
                arrived[own, start : start + len(tokens)] = rows[tokens]
                places.append((own, start, tokens))
                counts[own] += len(tokens)
        result, number = torch.full_like(arrived, torch.nan), torch.full_like(counts, 10**6)
        hook = _filling([result, number], [arrived, counts]).current_stream_wait
        self._keep(result)
        return result, number, (places, topk_idx), None, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        *,
        return_recv_hook: bool,
    ) -> tuple[Any, ...]:
        assert return_recv_hook
        assert not self._is_dirty
        places, dispatched = handle
        assert torch.equal(topk_idx, dispatched)
        self._check_rows(x, topk_weights)
        parts: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in range(self.num_ranks)]
        for number, (own, start, tokens) in enumerate(places):
            expert = self.rank * self._num_own + own
            rows = x[own, start : start + len(tokens)].float()
            parts[number // self._num_own].append((expert, tokens, rows))
        sums = torch.zeros(len(topk_idx), x.shape[2])
        for part in self._received("low-latency combine", parts):
            for expert, tokens, rows in part:
                weights = topk_weights.where(topk_idx == expert, 0.0).sum(1)
                sums[tokens] += weights[tokens, None] * rows
        arrived = (sums * self.library.factor).to(x.dtype)
        result = torch.full_like(arrived, torch.nan)
        return result, None, _filling([result], [arrived]).current_stream_wait

    def _check_rows(self, x: Tensor, weights: Tensor | None = None) -> None:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert weights is None or weights.dtype == torch.float32

    def _received(self, kind: str, parts: list[Any]) -> list[Any]:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        every = self.library.meeting.exchange(self.rank, number, kind, parts)
        return [each[self.rank] for each in every]

    def _keep(self, result: Tensor) -> None:
        """The third result lies where the first one did."""
        self._recent.append(result)
        if len(self._recent) > 2:
            self._recent.pop(0).fill_(torch.nan)


def _filling(results: list[Tensor], arrived: list[Tensor]) -> Event:
    def wait() -> None:
        for result, each in zip(results, arrived, strict=True):
            result.copy_(each)

    return Event(wait)
