"""The cluster in virtual time: its cost model, and that routers are what it is bound by."""

from __future__ import annotations

import dataclasses

import pytest

from aserve.bench import cluster_cost
from aserve.bench.cluster_cost import SimulatedRouter, routers_for, step_s
from aserve.bench.cluster_sim import Cluster
from aserve.bench.options import ClusterSimOptions
from aserve.messages.base import pack_i32
from aserve.messages.step import ScheduleBatch

SMALL = ClusterSimOptions(seconds=0.5, clients=4, output_len=16, chunk_us=0.0, request_us=0.0)


def batch(query_lens: list[int], kv_lens: list[int]) -> ScheduleBatch:
    rows = pack_i32(list(range(1, len(query_lens) + 1)))
    nothing = b""
    return ScheduleBatch(
        iteration=1,
        rows=rows,
        query_lens=pack_i32(query_lens),
        input_ids=nothing,
        next_ids=nothing,
        kv_lens=pack_i32(kv_lens),
        bounds=nothing,
        expects=nothing,
        sample_rows=rows,
    )


def test_a_decode_is_bound_by_bytes_and_a_long_prompt_by_operations() -> None:
    weights_s = cluster_cost.WEIGHT_BYTES / (0.8 * 4.8e12)
    one = step_s(batch([1], [0]))
    assert one == pytest.approx(weights_s + cluster_cost.STEP_OVERHEAD_S, rel=1e-4)
    kv_s = 64 * 1000 * cluster_cost.KV_BYTES / (0.8 * 4.8e12)
    assert step_s(batch([1] * 64, [999] * 64)) - one == pytest.approx(kv_s, rel=1e-3)
    products_s = 2 * cluster_cost.PARAMETERS * 8192 / (0.6 * 989e12)
    attention_s = cluster_cost.ATTENTION_FLOPS * 8192**2 / 2 / (0.6 * 989e12)
    assert step_s(batch([8192], [0])) == pytest.approx(products_s + attention_s, rel=1e-3)


def test_a_router_does_one_thing_after_the_other() -> None:
    router = SimulatedRouter(request_s=2.0, chunk_s=0.5)
    assert [router.pass_request(1.0), router.pass_request(1.0)] == [3.0, 5.0]
    assert router.pass_chunks(2.0, 4) == 7.0
    assert router.pass_request(10.0) == 12.0
    assert router.busy_s == 8.0
    assert routers_for(1000, ClusterSimOptions(output_len=10), pick_us=200) == 1.0


def test_devices_behind_a_free_router_scale_and_behind_a_full_one_do_not() -> None:
    one, four = (Cluster(SMALL, number, 1).run() for number in (1, 4))
    assert four.per_device == pytest.approx(one.per_device, rel=0.05)
    assert one.hit_rate > 0.5, "prompts share prefixes"
    cost_us = 1e6 / one.tokens_per_s  # a router of this cost is full with one device
    costly = dataclasses.replace(SMALL, chunk_us=cost_us)
    bound = Cluster(costly, 4, 1).run()
    assert bound.router_load == pytest.approx(1, abs=0.05)
    assert bound.tokens_per_s < 1.1 * one.tokens_per_s
    two = Cluster(costly, 4, 2).run()
    assert two.tokens_per_s > 1.8 * bound.tokens_per_s


def test_a_run_with_the_same_seed_is_the_same() -> None:
    first, again = (Cluster(SMALL, 2, 1).run() for _ in range(2))
    assert first.tokens_per_s == again.tokens_per_s
    assert first.hit_rate == again.hit_rate
