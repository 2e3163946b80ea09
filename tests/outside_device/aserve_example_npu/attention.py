"""The attention of the device. Its operator takes lengths from the host and from nowhere else.

The lengths of a captured forward change from replay to replay, so its operator looks them up when
it runs, by the number of its plan. `refresh` starts a thread that hands them over beside the
replay, and the operator waits for them, as an NPU's graph waits for the update of a node.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionKind, AttentionSite, Capabilities, StaticShape
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import ArrayI32


@dataclass
class Lengths:
    """The KV lengths of one plan, which may still be on their way."""

    number: int
    lens: Future[list[int]] = field(default_factory=Future)


PLANS: dict[int, Lengths] = {}
NUMBERS = itertools.count()
REFRESHED: list[ArrayI32] = []  # the lengths of each replay


def new_lengths(lens: list[int] | None = None) -> Lengths:
    made = Lengths(next(NUMBERS))
    if lens is not None:
        made.lens.set_result(lens)
    PLANS[made.number] = made
    return made


@torch.library.custom_op("aserve_example_npu::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, plan: int, query_lens: list[int],
    scale: float, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """q [tokens, heads, head_dim], keys and values [pages, page_size, kv_heads, head_dim], pages
    [rows, columns] -> like q. `window` and `softcap` are 0 for none."""
    out, start = torch.zeros_like(q), 0
    groups = q.shape[1] // keys.shape[2]
    lens = PLANS[plan].lens.result(timeout=10)
    for row, (query_len, kv_len) in enumerate(zip(query_lens, lens, strict=True)):
        own = slice(start, start + query_len)
        start += query_len
        k, v = (
            pool[pages[row]].flatten(0, 1)[:kv_len].repeat_interleave(groups, dim=1)
            for pool in (keys, values)
        )
        distance = torch.arange(kv_len - query_len, kv_len)[:, None] - torch.arange(kv_len)
        is_seen = (distance >= 0) & (distance < (window or kv_len))
        v = v.masked_fill(~is_seen.any(0)[:, None, None], 0)
        k = k.masked_fill(~is_seen.any(0)[:, None, None], 0)
        scores = torch.einsum("qhd,khd->hqk", q[own], k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        out[own] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


class NpuAttention:
    """An `AttentionBackend`, and its own `StaticPlans`."""

    def __init__(self, pools: KvPools) -> None:
        self._pools = pools
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="example-npu")
        self.static_plans = self

    def plan(self, batch: ForwardBatch) -> object:
        assert batch.lens_cpu is not None  # as `Capabilities.host_lens` asks for
        return new_lengths(batch.lens_cpu.tolist())

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        assert isinstance(plan, Lengths)
        query_lens = batch.query_lens_cpu.tolist()

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            size = self._pools.page_size
            by_page = (pool.view(-1, size, *pool.shape[1:]) for pool in (kv.keys, kv.values))
            pages = self._pools.page_tables[kv.group].index_select(0, batch.rows)
            return paged_attention(
                q, *by_page, pages, plan.number, query_lens,
                layer.scale, layer.window or 0, layer.softcap or 0.0,
            )  # fmt: skip

        return attend

    def is_better_eager(self, num_rows: int, shared_pages: int) -> bool:
        return False

    def make(self, shape: StaticShape) -> object:
        return new_lengths([shape.width] * shape.num_rows)

    def refresh(self, plan: object, lens: ArrayI32) -> None:
        assert isinstance(plan, Lengths)
        copied = lens.tolist()
        REFRESHED.append(lens.copy())
        plan.lens = self._beside.submit(lambda: copied)


def _build(site: AttentionSite) -> NpuAttention:
    return NpuAttention(site.pools)


KIND = AttentionKind(Capabilities(host_lens=True, can_capture=True), _build)
