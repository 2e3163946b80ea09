"""How rows of many queries attend on this CPU: chunks of prompts, fresh or behind a prefix.

It knows no forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from aserve.gpu.attention.dense import dense_attention
from aserve.gpu.device.cpu_facts import DOTS, read_cpu_facts
from aserve.gpu.kv.pools import KvPools
from aserve_kernels.cpu.chunk_attention import chunk_attention, compile_chunk_attention
from aserve_kernels.cpu.host_rows import HostRows
from aserve_kernels.cpu.products import OUTPUTS
from aserve_kernels.paged_rows import Scoring


class AttendRows(Protocol):
    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: HostRows, scoring: Scoring,
        /, *, out: Tensor,
    ) -> None:  # fmt: skip
        """As `paged_attention`."""


@dataclass(frozen=True, slots=True)
class ManyQueries:
    attend: AttendRows
    least: int  # queries of a row from which it takes less time than `paged_attention`,
    least_keys: int  # with so many keys
    hides: bool  # knows soft caps, and windows that hide something


def choose_many_queries(pools: KvPools, num_workers: int) -> ManyQueries:
    """PERF: torch's fused kernel multiplies bfloat16 in float32, unless the processor has matrix
    instructions; a kernel of its own takes the products of pairs of one that has only those. CPU
    time of one thread of an AMD EPYC (AVX-512 bf16), heads of Qwen3-0.6B, as `paged_attention` /
    fused / in pairs: 64 queries behind 4,000 keys 32 / 27 / 8 ms, 2,048 behind 6,144 1,918 / 1,295
    / 395; in float32 46 / 36 and 2,534 / 1,394; 64 without a prefix 0.8 / 0.5 / 0.2.
    """
    is_paired = pools.dtype == torch.bfloat16 and read_cpu_facts().bf16_products == DOTS
    if is_paired and all(kv.keys.shape[2] % OUTPUTS == 0 for kv in pools.layers.values()):
        return in_pairs(num_workers)
    return FUSED


def in_pairs(num_workers: int) -> ManyQueries:
    compile_chunk_attention(num_workers)
    attend = partial(chunk_attention, num_workers=num_workers)
    return ManyQueries(attend, least=4, least_keys=4, hides=True)


FUSED = ManyQueries(dense_attention, least=64, least_keys=256, hides=False)
