"""Replays through static buffers: the values of an eager forward, and nothing else touched."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.attention.paged_sdpa import PagedSdpa
from aserve.gpu.forward_batch import ForwardBatch, ForwardOverrides
from aserve.gpu.graphs import GraphRunner
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.hidden_capture import HiddenCapture
from aserve.messages import StepResult, array_i32
from tests.gpu.batch_builder import BatchBuilder
from tests.gpu.device_tables import PAGE_SIZE, device_batch, paged
from tests.gpu.drive import make_executor, request
from tests.gpu.gated_model import Gate, HookedModel
from tests.gpu.hash_model import HashModel
from tests.gpu.late_device import LateDevice
from tests.gpu.plain_engine import plain_outputs

SIZES = (2, 4, 8)
WINDOWS = (None, 6)


class Bench:
    """A model, pages with a history, and both ways to run a forward. Eager ones come second: they
    write the same keys and values again.
    """

    def __init__(self) -> None:
        self.model = HashModel(window=6)
        self.pools = paged()
        self.backend = PagedSdpa(self.pools, WINDOWS)
        self.graphs = GraphRunner(self.model, self.backend, self.pools, sizes=SIZES)
        self.eager(self.batch([7, 7, 7, 7, 7], [0] * 5))

    def batch(self, spans: list[int], kv_lens: list[int], *, first_id: int = 0) -> ForwardBatch:
        made = device_batch(spans, kv_lens, first_id=first_id)
        return ForwardBatch.init_new(made, self.pools)

    def eager(self, batch: ForwardBatch) -> Tensor:
        attend = self.backend.bind(batch, self.backend.plan(batch))
        return self.model.forward(batch.input_ids, batch.positions, attend)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_a_padded_replay_equals_the_eager_forward(num_rows: int) -> None:
    bench = Bench()
    batch = bench.batch([1] * num_rows, [7, 3, 0, 5, 6][:num_rows], first_id=8)
    replayed = bench.graphs.replay(batch).clone()
    torch.testing.assert_close(replayed, bench.eager(batch), rtol=0, atol=1e-9)


def test_a_replay_that_was_planned_before_still_gets_its_own_ids_and_positions() -> None:
    bench = Bench()
    bench.graphs.replay(bench.batch([1, 1], [7, 3], first_id=8))
    batch = bench.batch([1, 1], [6, 5], first_id=20)
    batch.mark_attention_planned(bench.backend.plan(batch))
    replayed = bench.graphs.replay(batch).clone()
    torch.testing.assert_close(replayed, bench.eager(batch), rtol=0, atol=1e-9)


def test_the_next_replay_overwrites_the_output() -> None:
    """Why results must be copied out first: it is one buffer."""
    bench = Bench()
    first = bench.graphs.replay(bench.batch([1, 1], [7, 3], first_id=8))
    kept = first.clone()
    bench.graphs.replay(bench.batch([1, 1], [6, 5], first_id=20))
    assert not torch.equal(first, kept)


async def test_results_that_are_read_after_later_replays_are_still_right() -> None:
    """Trap 7: six replays of one graph are through before the first result is read."""
    prompt = [3, 1, 4, 1, 5]
    device, gate = LateDevice(), Gate()
    executor = make_executor(HookedModel({7: gate}), device=device, graph_sizes=(2,))
    executor.start(asyncio.get_running_loop())
    try:
        builder = BatchBuilder(executor.spec)
        tickets = [executor.launch(builder.batch({2: prompt}, sampling=[2]))]
        tickets += [executor.launch(builder.batch({2: [-2]}, sampling=[2])) for _ in range(6)]
        gate.wait_until_there()
        gate.open()
        device.is_done.set()
        outcomes = [await ticket for ticket in tickets]
    finally:
        executor.close()
    tokens = [array_i32(o.tokens)[0] for o in outcomes if isinstance(o, StepResult)]
    assert tokens == plain_outputs(HashModel(), request("plain", prompt, max_tokens=7))


def contents(pools: KvPools) -> list[Tensor]:
    kv = [tensor for layer in pools.layers.values() for tensor in (layer.keys, layer.values)]
    return [tensor.clone() for tensor in (*kv, pools.token_pool, *pools.page_tables)]


def test_padding_rows_write_to_slot_0_and_nowhere_else() -> None:
    """Trap 11."""
    bench = Bench()
    before = contents(bench.pools)
    batch = bench.batch([1, 1, 1], [7, 3, 6], first_id=8)
    slots = torch.cat(batch.slots)
    bench.graphs.replay(batch)
    for old, new in zip(before, contents(bench.pools), strict=True):
        rows = (old != new).flatten(1).any(dim=1) if old.dim() > 1 else old != new
        assert set(torch.nonzero(rows)[:, 0].tolist()) <= {0, *slots.tolist()}


def test_real_rows_are_not_touched_by_what_lies_in_other_rows_pages() -> None:
    """NaN everywhere but in page 0 and the rows' own pages."""
    bench = Bench()
    batch = bench.batch([1, 1, 1], [7, 3, 6], first_id=8)
    expected = bench.graphs.replay(batch).clone()
    own = {0, 3, 4, 6, 7, 9, 10}
    for page in set(range(20)) - own:
        for layer in bench.pools.layers.values():
            layer.keys[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = torch.nan
            layer.values[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = torch.nan
    assert torch.equal(bench.graphs.replay(batch), expected)


def test_only_decodes_that_fit_and_capture_nothing_are_replayed() -> None:
    bench = Bench()
    assert bench.graphs.can_run(bench.batch([1, 1, 1], [7, 3, 6]))
    assert not bench.graphs.can_run(bench.batch([1, 2], [7, 3]))
    small = GraphRunner(bench.model, bench.backend, bench.pools, sizes=(1, 2))
    assert not small.can_run(bench.batch([1, 1, 1], [7, 3, 6]))
    overrides = ForwardOverrides(capture=HiddenCapture())
    capturing = ForwardBatch.init_new(device_batch([1], [7]), bench.pools, overrides)
    assert not bench.graphs.can_run(capturing)


@pytest.mark.parametrize("sizes", [(), (0, 2)])
def test_sizes_that_hold_no_row_are_refused(sizes: tuple[int, ...]) -> None:
    bench = Bench()
    with pytest.raises(ConfigError, match="numbers of rows"):
        GraphRunner(bench.model, bench.backend, bench.pools, sizes=sizes)
