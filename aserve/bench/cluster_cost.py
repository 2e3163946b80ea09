"""The cost model of `aserve bench cluster-sim`: how long devices, links and routers take.

A step computes `tokens` tokens of `rows` rows, which attend to `keys` keys in all:

    flops = 2 * parameters * tokens + attention_flops * pairs
    bytes = 2 * parameters + kv_bytes * keys
    step  = overhead + max(flops / (efficiency * peak flops), bytes / (efficiency * bandwidth))

`pairs` are the pairs of a query and a key. The parameters are read once per step, in 16 bits. The
defaults are an H200 (989 TFLOP/s of dense bfloat16, 4.8 TB/s, from its data sheet) and the shape of
Llama 3.1 8B (its config.json), with 0.6 of the peak rate and 0.8 of the bandwidth.

A router is a queue before one core. A request takes `request_us` of it plus the time of the
balancer's decision, and a streamed token `chunk_us`; `aserve bench route` measures both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aserve.bench.options import ClusterSimOptions
from aserve.messages.base import array_i32
from aserve.messages.step import ScheduleBatch

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
PARAMETERS = 8.03e9
WEIGHT_BYTES = 2 * PARAMETERS
KV_BYTES = 2 * 2 * LAYERS * KV_HEADS * HEAD_DIM  # keys and values of a token, 16 bits each
ATTENTION_FLOPS = 4 * LAYERS * HEADS * HEAD_DIM  # of a query with a key: two products
PEAK_FLOPS, FLOPS_SHARE = 989e12, 0.6
BYTES_PER_S, BYTES_SHARE = 4.8e12, 0.8
STEP_OVERHEAD_S = 50e-6  # launch of a graph, and sampling


def step_s(batch: ScheduleBatch) -> float:
    """Returns the seconds that the device computes a step."""
    queries = array_i32(batch.query_lens).astype(np.float64)
    keys = array_i32(batch.kv_lens) + queries
    flops = 2 * PARAMETERS * float(queries.sum())
    flops += ATTENTION_FLOPS * float((queries * (keys - (queries - 1) / 2)).sum())
    read = WEIGHT_BYTES + KV_BYTES * float(keys.sum())
    compute_s = flops / (FLOPS_SHARE * PEAK_FLOPS)
    return STEP_OVERHEAD_S + max(compute_s, read / (BYTES_SHARE * BYTES_PER_S))


@dataclass(slots=True)
class SimulatedRouter:
    """One core, which does one thing after the other. `free_s` is when it has done all of them."""

    request_s: float
    chunk_s: float
    free_s: float = 0.0
    busy_s: float = 0.0

    def pass_request(self, now_s: float) -> float:
        """Returns when the request leaves the router."""
        return self._take(now_s, self.request_s)

    def pass_chunks(self, now_s: float, count: int) -> float:
        """Returns when the last of the chunks, which come together, leaves the router."""
        return self._take(now_s, count * self.chunk_s)

    def _take(self, now_s: float, took_s: float) -> float:
        self.free_s = max(self.free_s, now_s) + took_s
        self.busy_s += took_s
        return self.free_s


def routers_for(requests_per_s: float, options: ClusterSimOptions, *, pick_us: float) -> float:
    """Returns how many cores of routers are busy at a rate of requests."""
    cost_us = options.request_us + pick_us + options.output_len * options.chunk_us
    return requests_per_s * cost_us / 1e6
