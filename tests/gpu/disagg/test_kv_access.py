"""KV travels from pages of one engine to those of another one, whose pages have another size."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.disagg.kv_access import TorchKvAccess
from aserve.gpu.kv.layer_groups import LayerSpec, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.step.resolve import DeviceState
from aserve.messages.base import pack_i32
from aserve.messages.executor import GroupSpec
from aserve.messages.results import StepResult
from aserve.messages.transfers import HostKv
from tests.fakes.hash_model import HashModel
from tests.gpu.batch_builder import running
from tests.gpu.device_tables import make_tables
from tests.gpu.drive import make_executor

NUM_PAGES = 12
LAYERS = (
    LayerSpec(0, 4, 2, 8, 1.0),
    LayerSpec(1, 4, 2, 8, 1.0, window=6),
    LayerSpec(2, 4, 2, 8, 1.0),
)
LATENTS = (LayerSpec(0, 4, 1, 12, 1.0, value_dim=8),)
Job = Callable[[], None]
T = TypeVar("T")


def engine(
    layers: tuple[LayerSpec, ...],
    page_size: int,
    *,
    dtype: torch.dtype = torch.float64,
    writes_here: bool = False,
) -> tuple[TorchKvAccess, tuple[KvPools, ...], list[Job]]:
    """Pools of a model and of a drafter with its first layer, all of whose KV is NaN or random."""
    groups, table_shape = group_layers(layers), (3, NUM_PAGES)
    specs = tuple(GroupSpec(group.name, NUM_PAGES, group.window) for group in groups)
    pools = KvPools(
        groups,
        specs,
        page_size=page_size,
        table_shape=table_shape,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    drafts = pools.beside(group_layers(layers[:1]), specs, torch.float32)
    tables = make_tables()
    state = DeviceState(pools, tables.tables, tables.relay, draft_pools=drafts)
    jobs: list[Job] = []
    access = TorchKvAccess(state, CpuDevice("cpu"), jobs.append, writes_here=writes_here)
    return access, (pools, drafts), jobs


def stored(pools: tuple[KvPools, ...], group: int) -> list[torch.Tensor]:
    """Views [layers, slots, heads, dim] of all pools of a group."""
    return [pool for each in pools for pool in each.pools_of(group) if pool.numel()]


def done(future: Future[T], jobs: list[Job]) -> T:
    assert not future.done(), "it waits for its turn on the executor's thread"
    jobs.pop(0)()
    return future.result(timeout=0)


@pytest.mark.parametrize("layers", [LAYERS, LATENTS], ids=["two groups", "latents"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("here", "there", "num_split", "writes_here"),
    [(4, 4, 0, False), (4, 3, 1, True), (1, 16, 1, False), (16, 1, 0, True)],
)
def test_the_kv_of_tokens_and_nothing_else_is_copied(
    layers: tuple[LayerSpec, ...],
    dtype: torch.dtype,
    here: int,
    there: int,
    num_split: int,
    writes_here: bool,
) -> None:
    """`num_split` layers are written before the others."""
    read, source, source_jobs = engine(layers, here, dtype=dtype)
    write, target, jobs = engine(layers, there, dtype=dtype, writes_here=writes_here)
    num_groups, length = len(group_layers(layers)), 11
    start = there if there < length else 0  # a prefix hit has whole pages
    for group in range(num_groups):
        for pool in stored(source, group):
            pool.copy_(torch.randn(pool.shape))
        for pool in stored(target, group):
            pool.fill_(torch.nan)
    from_pages = [np.random.default_rng(1).permutation(NUM_PAGES - 1)[: -(-length // here)] + 1]
    from_pages *= 2
    to_pages = [np.arange(1, 1 + -(-length // there)) for _ in range(2)]
    ids = np.arange(70, 70 + length, dtype=np.int32)
    for first, stop in ((start, start + 1), (start + 1, 7), (7, length)):
        pages = tuple(pack_i32(each) for each in from_pages[:num_groups])
        data = done(read.read(pages, first, stop), source_jobs)()
        assert len(data) == (stop - first) * read.bytes_per_token
        pages = tuple(pack_i32(each) for each in to_pages[:num_groups])
        split = (stop - first) * sum(read.layer_bytes[:num_split])
        parts = {
            range(num_split): data[:split],
            range(num_split, len(read.layer_bytes)): data[split:],
        }
        for of_layers, part in parts.items():
            if part:
                token_ids = ids[first:stop].tobytes()
                future = write.write(pages, first, token_ids, part, of_layers)
                assert writes_here == (not jobs), "steps wait for what another thread has done"
                future.result(timeout=0) if writes_here else done(future, jobs)
    positions = np.arange(start, length)
    slots = [
        pages[positions // size] * size + positions % size
        for pages, size in ((from_pages[0], here), (to_pages[0], there))
    ]
    for group in range(num_groups):
        for sent, came in zip(stored(source, group), stored(target, group), strict=True):
            assert torch.equal(came[:, slots[1]], sent[:, slots[0]])
            end = to_pages[0][-1] * there + there
            tail = np.arange(end - there + (length % there or there), end)
            assert not came[:, tail].any(), "a former owner's values stand in the last page"
            assert torch.isnan(came[:, end:]).all(), "another page was written"
    assert target[0].token_pool[slots[1]].tolist() == ids[start:].tolist()
    assert read.geometry == write.geometry


def test_what_fails_on_the_device_does_not_end_its_thread() -> None:
    access, _, jobs = engine(LAYERS, 4)
    future = access.read((pack_i32([99]), pack_i32([99])), 0, 1)
    jobs.pop()()
    with pytest.raises(RuntimeError):
        future.result(timeout=0)


def test_other_layers_have_another_geometry() -> None:
    geometries = {engine(layers, 4)[0].geometry for layers in (LAYERS, LAYERS[:2], LATENTS)}
    geometries.add(engine(LAYERS, 4, dtype=torch.float32)[0].geometry)
    assert len(geometries) == 4


def test_kv_in_host_memory_is_not_transferred() -> None:
    class OtherPools(KvPools):
        pass

    tables = make_tables()
    pools = object.__new__(OtherPools)
    state = DeviceState(pools, tables.tables, tables.relay)
    with pytest.raises(ConfigError, match="--enable-hisparse"):
        TorchKvAccess(state, CpuDevice("cpu"), lambda _: None)


STREAMED = {
    "windows": HashModel(window=40, second_window=50),
    "latents": HashModel(is_latent=True),
    "latents and index keys": HashModel(is_latent=True, top_k=5),
}


@pytest.mark.parametrize("model", STREAMED.values(), ids=STREAMED)
async def test_layers_of_a_step_are_read_while_it_runs_but_for_the_last_one(
    model: HashModel,
) -> None:
    executor = make_executor(model, attention="torch-ref")
    access = executor.kv_access()
    layers = executor._runner.state.pools.layers
    came: list[tuple[int, memoryview]] = []
    is_next_stored: list[bool] = []

    async with running(executor) as builder:
        batch = builder.batch({2: list(range(9))}, sampling=[2])
        pages = tuple(writes.pages for writes in batch.page_writes)

        def on_layer(layer: int, values: HostKv) -> None:
            came.append((layer, values()))
            is_next_stored.append(bool(layers[layer + 1].keys.any()))

        access.stream(batch.iteration, pages, range(2, 7), on_layer)
        access.stream(batch.iteration + 1, pages, range(2, 7), on_layer)
        assert isinstance(await executor.launch(batch), StepResult)
        num_layers = len(access.layer_bytes)
        reads = [access.read(pages, 2, 7, layer) for layer in range(num_layers + 1)]
        whole, *_ = behind = [bytes(read.result(10)()) for read in reads]
        assert [layer for layer, _ in came] == [*range(num_layers - 1)]
        assert not any(is_next_stored)
        for layer, values in came:
            assert values == behind[layer][: len(values)]
            assert behind[layer][len(values) :] == behind[layer + 1]
        assert len(whole) == 5 * access.bytes_per_token == 5 * sum(access.layer_bytes)
        builder.iteration += 1  # a step that was dropped, and so is the wish
        later = builder.batch({3: [5, 6]}, sampling=[3])
        assert isinstance(await executor.launch(later), StepResult)
    assert len(came) == num_layers - 1
