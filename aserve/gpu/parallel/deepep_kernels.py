"""DeepEP's own kernels for the two modes of moe/deepep.py, where the library deep_ep is installed.

Ranks on GPUs of one node write rows into each other's memory over NVLink, and those of several
nodes by RDMA from the device; the exchange over torch.distributed stands beside them as the
fallback and as the reference. Rows are bfloat16. All ranks come to the same choice at the start,
after a trial of the modes that will be used.

In the normal mode the host waits for the counts of all ranks. In the low-latency mode shapes are
fixed, nothing waits, and forwards are captured. Its results lie in two buffers that take turns, so
at most two of its exchanges are open at once, as in two-batch overlap. Its buffers have to be
cleaned after the normal mode.

Source: deep_ep/buffers/legacy.py (`deep_ep.Buffer`) of https://github.com/deepseek-ai/DeepEP
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from aserve.gpu.layers.grouped_linear import Groups
from aserve.gpu.moe.dispatch import Dispatcher, OwnRows, own_rows
from aserve.gpu.moe.routing import Routed
from aserve.gpu.parallel.device_collectives import DeviceCollectives, WaitContext
from aserve.gpu.parallel.host_comm import HostComm, Message

DTYPE = torch.bfloat16
NO_EXPERT = -1
NUM_TRIED = 5  # tokens of a rank in the trial
TOLERANCE = 2e-2  # bfloat16 has 8 bits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The shape that all layers of experts of a model share."""

    num_experts: int  # of all ranks
    hidden_size: int
    dtype: torch.dtype
    max_low_latency: int  # tokens of a rank in the low-latency mode; 0: it is not used


class DeepEpKernels:
    """One `deep_ep.Buffer` for all layers of a rank. `buffer` has its methods."""

    __slots__ = ("_is_dirty", "_layout", "buffer", "num_own", "waiting")

    def __init__(
        self, buffer: Any, layout: ExpertLayout, *, num_ranks: int, waiting: WaitContext
    ) -> None:
        self.buffer = buffer
        self.num_own = layout.num_experts // num_ranks
        self.waiting = waiting
        self._layout = layout
        self._is_dirty = False

    @property
    def num_experts(self) -> int:
        return self._layout.num_experts

    @property
    def max_low_latency(self) -> int:
        return self._layout.max_low_latency

    def dispatcher(self, num_tokens: int) -> Dispatcher:
        """Returns the dispatcher for parts of at most so many tokens."""
        if num_tokens <= self.max_low_latency:
            return LowLatencyKernels(self)
        return NormalKernels(self)

    def note_normal(self) -> None:
        self._is_dirty = True

    def prepare_low_latency(self) -> None:
        """Cleans what the normal mode has left. All ranks call it before the same forward."""
        if self._is_dirty and self.max_low_latency:
            layout = self._layout
            self.buffer.clean_low_latency_buffer(
                layout.max_low_latency, layout.hidden_size, layout.num_experts
            )
        self._is_dirty = False

    def chosen(self, routed: Routed) -> Tensor:
        """Returns the experts, int64 [tokens, k], with -1 for those that are nowhere."""
        experts = routed.experts
        return experts.where(experts < self.num_experts, NO_EXPERT)


@dataclass(frozen=True, slots=True)
class NormalKernels:
    """The normal mode, as a `Dispatcher`."""

    kernels: DeepEpKernels

    def start(self, x: Tensor, routed: Routed) -> SentTokens:
        kernels, buffer = self.kernels, self.kernels.buffer
        kernels.note_normal()
        experts = kernels.chosen(routed)
        with kernels.waiting():
            per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
                experts, kernels.num_experts
            )
            received, local, weights, _, handle, event = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=experts,
                topk_weights=routed.weights.float(),
                async_finish=True,
            )
        return SentTokens(kernels, (received, local, weights), handle, event)


@dataclass(frozen=True, slots=True)
class SentTokens:
    """A `Sent`."""

    kernels: DeepEpKernels
    received: tuple[Tensor, Tensor, Tensor]  # tokens, local experts or -1, weights
    handle: object
    event: Any

    def finish(self) -> ArrivedTokens:
        self.event.current_stream_wait()
        rows = own_rows(*self.received, num_own=self.kernels.num_own)
        return ArrivedTokens(self, rows)


@dataclass(frozen=True, slots=True)
class ArrivedTokens:
    """An `Arrived`."""

    sent: SentTokens
    rows: OwnRows

    @property
    def x(self) -> Tensor:
        return self.rows.x

    @property
    def groups(self) -> Groups:
        return self.rows.groups

    def combine(self, y: Tensor) -> Sums:
        """The kernel adds up the ranks' sums without weights."""
        buffer = self.sent.kernels.buffer
        sums, _, event = buffer.combine(self.rows.sums(y), self.sent.handle, async_finish=True)
        return Sums(sums, event.current_stream_wait)


@dataclass(frozen=True, slots=True)
class Sums:
    """A `Combining`."""

    sums: Tensor
    wait: Callable[[], None]

    def finish(self) -> Tensor:
        self.wait()
        return self.sums


@dataclass(frozen=True, slots=True)
class LowLatencyKernels:
    """The low-latency mode, as a `Dispatcher`."""

    kernels: DeepEpKernels

    def start(self, x: Tensor, routed: Routed) -> SentRows:
        kernels = self.kernels
        kernels.prepare_low_latency()
        routed = Routed(kernels.chosen(routed), routed.weights.float())
        received, counts, handle, _, hook = kernels.buffer.low_latency_dispatch(
            x,
            routed.experts,
            kernels.max_low_latency,
            kernels.num_experts,
            use_fp8=False,
            return_recv_hook=True,
        )
        return SentRows(kernels, received, counts, routed, handle, hook)


@dataclass(frozen=True, slots=True)
class SentRows:
    """A `Sent`."""

    kernels: DeepEpKernels
    received: Tensor  # [local experts, ranks * max_low_latency, hidden], the filled rows first
    counts: Tensor  # int32 [local experts]
    routed: Routed
    handle: object
    hook: Callable[[], None]  # waits until all rows have come

    def finish(self) -> ArrivedRows:
        self.hook()
        num_own, room, hidden = self.received.shape
        starts = torch.arange(0, num_own * room, room, dtype=torch.int32, device=self.counts.device)
        groups = Groups(starts, starts + self.counts.int())
        return ArrivedRows(self, self.received.view(num_own * room, hidden), groups)


@dataclass(frozen=True, slots=True)
class ArrivedRows:
    """An `Arrived`."""

    sent: SentRows
    x: Tensor
    groups: Groups

    def combine(self, y: Tensor) -> Sums:
        sent = self.sent
        sums, _, hook = sent.kernels.buffer.low_latency_combine(
            y.view(sent.received.shape),
            sent.routed.experts,
            sent.routed.weights,
            sent.handle,
            return_recv_hook=True,
        )
        return Sums(sums, hook)


class _Comm:
    """The part of MPI's communicator that `deep_ep.Buffer` calls. Its handles are bytearrays."""

    def __init__(self, host: HostComm) -> None:
        self._host = host
        self.Get_rank, self.Get_size = host.Get_rank, host.Get_size

    def allgather(self, data: Message) -> list[Any]:
        every = self._host.allgather(data)
        return [bytearray(each) if isinstance(each, bytes) else each for each in every]


def deepep_kernels(
    ranks: DeviceCollectives, layout: ExpertLayout, device: torch.device
) -> DeepEpKernels | None:
    """Returns DeepEP's kernels if all ranks have them, and they are right. All ranks call this."""
    host = ranks.host
    if not host.least(find_spec("deep_ep") is not None and layout.dtype == DTYPE):
        return None
    kernels = _made(ranks, layout)
    if not host.least(kernels is not None) or kernels is None:
        return None
    if not host.least(_is_right(kernels, ranks, layout, device)):
        return None
    logger.info("rows travel to their experts by kernels=deep_ep experts=%d", layout.num_experts)
    return kernels


def _made(ranks: DeviceCollectives, layout: ExpertLayout) -> DeepEpKernels | None:
    import deep_ep

    num_ranks, row_bytes = ranks.num_ranks, layout.hidden_size * layout.dtype.itemsize
    make = deep_ep.Buffer
    try:
        configs = make.get_dispatch_config(num_ranks), make.get_combine_config(num_ranks)
        rdma_bytes = [each.get_rdma_buffer_size_hint(row_bytes, num_ranks) for each in configs]
        if most := layout.max_low_latency:
            rdma_bytes.append(
                make.get_low_latency_rdma_size_hint(
                    most, layout.hidden_size, num_ranks, layout.num_experts
                )
            )
        buffer = make(
            None,
            max(each.get_nvl_buffer_size_hint(row_bytes, num_ranks) for each in configs),
            max(rdma_bytes),
            low_latency_mode=bool(most),
            num_qps_per_rank=layout.num_experts // num_ranks,
            comm=_Comm(HostComm(ranks.host)),
        )
    except (RuntimeError, AssertionError, TypeError, AttributeError) as error:
        logger.warning("rows travel by NCCL, because deep_ep cannot: %s", error)
        return None
    return DeepEpKernels(buffer, layout, num_ranks=num_ranks, waiting=ranks.waiting)


def _is_right(
    kernels: DeepEpKernels, ranks: DeviceCollectives, layout: ExpertLayout, device: torch.device
) -> bool:
    """Sends some tokens to experts that only scale their rows. It blocks."""
    draw = torch.Generator().manual_seed(ranks.rank)
    factors = 1.0 + torch.arange(layout.num_experts, device=device) / layout.num_experts
    own = factors[ranks.rank * kernels.num_own :][: kernels.num_own]
    x = torch.randn((NUM_TRIED, layout.hidden_size), generator=draw).to(device, layout.dtype)
    top_k = min(2, layout.num_experts)
    scores = torch.rand((NUM_TRIED, layout.num_experts), generator=draw).topk(top_k)
    routed = Routed(scores.indices.to(device), scores.values.to(device))
    expected = x.float() * (routed.weights * factors[routed.experts]).sum(1, keepdim=True)
    modes = (NormalKernels, LowLatencyKernels) if layout.max_low_latency else (NormalKernels,)
    try:
        with kernels.waiting():
            return all(_scaled_right(mode(kernels), x, routed, own, expected) for mode in modes)
    except (RuntimeError, AssertionError) as error:
        logger.warning("rows travel by NCCL, because deep_ep fails: %s", error)
        return False


def _scaled_right(
    dispatcher: Dispatcher, x: Tensor, routed: Routed, factors: Tensor, expected: Tensor
) -> bool:
    arrived = dispatcher.start(x, routed).finish()
    rows = torch.arange(len(arrived.x), device=x.device)[:, None]
    is_in = (rows >= arrived.groups.starts) & (rows < arrived.groups.ends)
    scale = (is_in.float() @ factors)[:, None]
    y = arrived.combine((arrived.x * scale).to(x.dtype)).finish()
    return torch.allclose(y.float(), expected, rtol=TOLERANCE, atol=TOLERANCE)
