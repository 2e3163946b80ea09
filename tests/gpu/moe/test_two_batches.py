"""Two halves whose layers take turns give the tokens of the whole, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.layers.grouped_linear import Groups
from aserve.gpu.models.base import Attend
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import parse_config
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.families import qwen3_moe
from aserve.gpu.moe.deepep import LowLatencyDispatcher, NormalDispatcher
from aserve.gpu.moe.dispatch import Dispatcher, LocalDispatcher, LocalRows, LocalSums
from aserve.gpu.moe.logical_ranks import LogicalExchange, LogicalRanks, together
from aserve.gpu.moe.routing import Routed
from aserve.gpu.moe.two_batches import (
    Stages,
    TwoBatches,
    decoder_in_stages,
    drain,
    expert_layers,
    in_turns,
)
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.source import WHOLE, LoadProgress, Shard, Target
from tests.gpu.device_tables import device_batch, make_pools

NUM_EXPERTS, LAYERS, PAGE_SIZE, COLUMNS = 8, 3, 4, 6
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [1],
}
# Decodes, one row, a prompt beside decodes, the fewest tokens that have halves, and windows.
SHAPES = [
    ([1] * 6, [3, 0, 9, 4, 1, 7]),
    ([9], [4]),
    ([7, 1, 1], [0, 5, 2]),
    ([2], [0]),
    ([5, 1, 5, 5], [6, 3, 1, 8]),
]


def decoder(make: Callable[[int], Dispatcher] = LocalDispatcher, shard: Shard = WHOLE) -> Decoder:
    config = parse_config(Fields(CONFIG, source="config"), defaults=qwen3_moe.DEFAULTS)
    spec: DecoderSpec = qwen3_moe.qwen3_moe(config)
    progress = LoadProgress(0, dtype=torch.float64)
    target = Target(shard=shard)
    weights = DummyWeights(target, dtype=torch.float64, progress=progress)
    model = Decoder(spec, weights, max_model_len=64)
    for mlp in expert_layers(model):
        mlp.dispatcher = make(mlp.num_experts)
    return model


class Forward:
    """One forward of a decoder over pages of its own, with random KV before it."""

    def __init__(self, model: Decoder, query_lens: list[int], kv_lens: list[int]) -> None:
        num_rows = len(query_lens)
        pools = make_pools(
            model.layers, 1 + COLUMNS * num_rows, table_shape=(num_rows + 1, COLUMNS)
        )
        generator = torch.Generator().manual_seed(2)
        for table in pools.page_tables:
            table[1:] = 1 + torch.arange(COLUMNS * num_rows).view(num_rows, COLUMNS)
        for kv in pools.layers.values():
            for pool in (kv.keys, kv.values):
                pool.copy_(torch.randn(pool.shape, generator=generator, dtype=pool.dtype))
        self.model = model
        self.attention = TorchReference(pools)
        self.batch = ForwardBatch.init_new(device_batch(query_lens, kv_lens), pools)

    @property
    def attend(self) -> Attend:
        return self.attention.bind(self.batch, self.attention.plan(self.batch))

    def whole(self) -> Tensor:
        return self.model.forward(self.batch.input_ids, self.batch.rope_positions, self.attend)

    def in_one(self) -> Stages:
        return decoder_in_stages(
            self.model, self.batch.input_ids, self.batch.rope_positions, self.attend
        )

    def in_two(self) -> Stages:
        return TwoBatches(self.model, self.attention).stages(self.batch)


@pytest.mark.parametrize(("query_lens", "kv_lens"), SHAPES)
def test_b27_two_halves_are_the_whole_for_one_row_and_for_windows(
    query_lens: list[int], kv_lens: list[int]
) -> None:
    expected = Forward(decoder(), query_lens, kv_lens).whole()
    halved = Forward(decoder(), query_lens, kv_lens)
    two = TwoBatches(halved.model, halved.attention)
    assert two.can_run(halved.batch)
    torch.testing.assert_close(two.run(halved.batch), expected, atol=1e-12, rtol=1e-12)


Make = Callable[[int, LogicalExchange], Dispatcher]
MODES: dict[str, Make] = {
    "normal": NormalDispatcher,
    "low-latency": lambda count, exchange: LowLatencyDispatcher(count, exchange, max_tokens=12),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("is_halved", [False, True])
def test_ranks_with_parts_of_the_experts_compute_what_one_with_all_does(
    mode: str, num_ranks: int, *, is_halved: bool
) -> None:
    """Each rank has tokens of its own."""
    ranks = LogicalRanks(num_ranks)
    forwards, expected = [], []
    for rank, exchange in enumerate(ranks.exchanges()):
        query_lens, kv_lens = SHAPES[rank]

        def make(count: int, exchange: LogicalExchange = exchange) -> Dispatcher:
            return MODES[mode](count, exchange)

        model = decoder(make, ranks.shard(rank))
        forwards.append(Forward(model, query_lens, kv_lens))
        expected.append(Forward(decoder(), query_lens, kv_lens).whole())
    got = together([each.in_two() if is_halved else each.in_one() for each in forwards])
    for own, other in zip(got, expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-12, rtol=1e-12)


@dataclass
class Traced:
    """A `Dispatcher`, `Sent`, `Arrived` and `Combining` that notes each call with its tokens."""

    events: list[str]
    inner: LocalDispatcher

    def start(self, x: Tensor, routed: Routed) -> TracedRows:
        self.events.append(f"send {len(x)}")
        return TracedRows(self.events, self.inner.start(x, routed), len(x))


@dataclass
class TracedRows:
    events: list[str]
    rows: LocalRows
    size: int

    @property
    def x(self) -> Tensor:
        return self.rows.x

    @property
    def groups(self) -> Groups:
        return self.rows.groups

    def finish(self) -> TracedRows:
        self.events.append(f"receive {self.size}")
        return self

    def combine(self, y: Tensor) -> TracedSums:
        self.events.append(f"return {self.size}")
        return TracedSums(self.events, self.rows.combine(y), self.size)


@dataclass
class TracedSums:
    events: list[str]
    sums: LocalSums
    size: int

    def finish(self) -> Tensor:
        self.events.append(f"sum {self.size}")
        return self.sums.finish()


def test_one_half_computes_while_the_rows_of_the_other_travel() -> None:
    """Halves of 2 and 3 tokens, and experts in the first and the last of three layers."""
    events: list[str] = []
    drain(Forward(decoder(lambda n: Traced(events, LocalDispatcher(n))), [5], [0]).in_two())
    layer = ["receive 2", "return 2", "receive 3", "return 3", "sum 2"]
    assert events == [
        *("send 2", "send 3", *layer, "send 2", "sum 3", "send 3", *layer, "sum 3"),
    ]


def test_a_half_with_fewer_stages_waits_for_nobody() -> None:
    events: list[str] = []

    def stages(name: str, count: int) -> Stages:
        for number in range(count):
            events.append(f"{name}{number}")
            yield
        return torch.full((1, 1), float(count))

    assert drain(in_turns(stages("a", 1), stages("b", 3))).tolist() == [[1.0], [3.0]]
    assert events == ["a0", "b0", "b1", "b2"]
