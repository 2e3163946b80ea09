"""`aserve bench two-batches` measures two-batch overlap on logical ranks behind a slow link.

The ranks run one after the other in this process, and each has a part of the experts. The link is
simulated: rows arrive after the time that a link of a given speed would take. The speed is chosen
so that the rows of one forward travel for as long as the forward computes, because then there is
most to gain. Forwards in one piece and in two halves take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from aserve.bench.options import TwoBatchesOptions
from aserve.bench.result import BenchResult, Table, median, progress, spread
from aserve.config import Resolved
from aserve.gpu.attention.base import AttentionBackend, AttentionSite
from aserve.gpu.attention.select import build_attention
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.linear import linear_per_expert
from aserve.gpu.kv.layer_groups import group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import parse_config
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.families import qwen3_moe
from aserve.gpu.moe.deepep import NormalDispatcher
from aserve.gpu.moe.logical_ranks import Link, LogicalExchange, LogicalRanks, together
from aserve.gpu.moe.two_batches import Stages, TwoBatches, decoder_in_stages, expert_layers
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.source import LoadProgress, Target
from aserve.messages.executor import GroupSpec

TITLE = "two-batch overlap, ms per forward of all ranks"
PAGE_SIZE = 16
CONTEXT = 64
SHAPE: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}


def run(options: TwoBatchesOptions, _resolved: Resolved) -> BenchResult:
    torch.set_num_threads(1)
    boxes = LogicalRanks(options.ranks)
    ranks = [_rank(boxes, exchange, options.rows) for exchange in boxes.exchanges()]

    def in_one() -> None:
        boxes.clear()
        together([rank.in_one() for rank in ranks])

    def in_two() -> None:
        boxes.clear()
        together([rank.in_two() for rank in ranks])

    with torch.inference_mode(), progress(TITLE, 2 * options.repeats) as done:
        computing_s = min(_seconds(in_one) for _ in range(3))
        num_bytes = boxes.num_bytes
        boxes.link = Link(bytes_per_s=num_bytes / options.ranks / computing_s)
        times: dict[str, list[float]] = {"in one piece": [], "in two halves": []}
        for _ in range(options.repeats):
            for name, forward in (("in one piece", in_one), ("in two halves", in_two)):
                times[name].append(_seconds(forward) * 1e3)
                done()
    ms = {name: median(values) for name, values in times.items()}
    gain = ms["in one piece"] / ms["in two halves"]
    figures = {"computing_ms": computing_s * 1e3, "bytes": num_bytes, "gain": gain, **ms}
    rows = [
        ["computing alone, in one piece", f"{computing_s * 1e3:.1f}", ""],
        *([name, f"{value:.1f}", f"{spread(times[name]):.0%}"] for name, value in ms.items()),
        ["gain", f"{gain:.2f}x", ""],
    ]
    note = (
        f"{options.ranks} logical ranks of {options.rows} rows each behind {CONTEXT} tokens; "
        f"{SHAPE['num_hidden_layers']} layers of {SHAPE['num_experts']} experts in float32, one "
        f"thread; DeepEP's normal mode moves {num_bytes / 1e6:,.1f} MB a forward over a simulated "
        f"link; medians of {options.repeats} repeats in turns"
    )
    return BenchResult(figures, (Table(TITLE, ["forward", "ms", "spread"], rows),), (note,))


def _seconds(forward: Callable[[], None]) -> float:
    start = time.perf_counter()
    forward()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's decode step, over pages of its own."""

    model: Decoder
    attention: AttentionBackend
    batch: ForwardBatch

    def in_one(self) -> Stages:
        attend = self.attention.bind(self.batch, self.attention.plan(self.batch))
        batch = self.batch
        return decoder_in_stages(self.model, batch.input_ids, batch.rope_positions, attend)

    def in_two(self) -> Stages:
        return TwoBatches(self.model, self.attention).stages(self.batch)


def _rank(boxes: LogicalRanks, exchange: LogicalExchange, num_rows: int) -> _Rank:
    config = parse_config(Fields(SHAPE, source=TITLE), defaults=qwen3_moe.DEFAULTS)
    spec = qwen3_moe.qwen3_moe(config)
    dtype = torch.float32
    target = Target(prepare_grouped=linear_per_expert, shard=boxes.shard(exchange.rank))
    weights = DummyWeights(target, dtype=dtype, progress=LoadProgress(0, dtype=dtype))
    model = Decoder(spec, weights, max_model_len=2 * CONTEXT)
    for mlp in expert_layers(model):
        mlp.dispatcher = NormalDispatcher(mlp.num_experts, exchange)
    columns = 2 * CONTEXT // PAGE_SIZE
    groups = group_layers(model.layers)
    num_pages = 1 + num_rows * columns
    pools = KvPools(
        groups,
        tuple(GroupSpec(group.name, num_pages, group.window) for group in groups),
        page_size=PAGE_SIZE,
        table_shape=(num_rows + 1, columns),
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for table in pools.page_tables:
        table[1:] = 1 + torch.arange(num_rows * columns).view(num_rows, columns)
    device = CpuDevice()
    site = AttentionSite(pools, groups, dtype, device)
    attention = build_attention("auto", site, order=device.attention).backend
    return _Rank(model, attention, ForwardBatch.init_new(_decode_step(num_rows), pools))


def _decode_step(num_rows: int) -> DeviceBatch:
    numbers = torch.arange(num_rows)
    ones = np.ones(num_rows, np.int32)
    return DeviceBatch(
        iteration=1,
        rows=1 + numbers,
        query_lens=torch.ones_like(numbers),
        kv_lens=torch.full_like(numbers, CONTEXT),
        input_ids=numbers,
        token_to_row=numbers,
        offsets=torch.zeros_like(numbers),
        query_lens_cpu=ones,
        len_bounds_cpu=ones + np.int32(CONTEXT),
    )
