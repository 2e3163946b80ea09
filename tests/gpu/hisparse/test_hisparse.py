"""HiSparse: tokens and logprobs do not depend on the hot rows, on swaps, or on when new rows are
backed up, and the host has what a device would have.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aserve.cache.layout import GroupLayout
from aserve.errors import ConfigError
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.hisparse.config import HiSparseConfig
from aserve.gpu.hisparse.host_kv import Backup, HostKvPools
from aserve.gpu.hisparse.hot_rows import NOWHERE, HotRows, HotShape, copy_rows
from aserve.gpu.hisparse.memory import HostMemory, kv_budget
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.spec.base import AFTER_NORM
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.multi_layer import MultiLayer
from aserve.messages.base import array_i32
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import HashModel
from tests.fakes.hidden_draft import HiddenModules, pool_kv, text_of
from tests.gpu.device_tables import make_pools
from tests.gpu.drive import Served, captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens
from tests.gpu.test_traces import STEM

TOP_K = 5
MODEL = HashModel(is_latent=True, top_k=TOP_K)
# Prompts share their first tokens, and not all fit at a time.
ASKED = [request(f"r{n}", [*STEM[: 14 + n], n], max_tokens=18, logprobs=0) for n in range(5)]


def run(config: HiSparseConfig | None, **options: Any) -> tuple[Served, KvPools]:
    settings = {"num_pages": 19, "max_batched_tokens": 8, "attention": "torch-ref", **options}
    executor = make_executor(MODEL, hisparse=config, **settings)
    served = serve(executor, ASKED, chaos=2)
    return served, pools_of(executor)


def pools_of(executor: TorchExecutor) -> KvPools:
    return executor._runner.state.pools


@pytest.fixture(scope="module")
def smallest() -> Served:
    served, pools = run(HiSparseConfig(device_buffer_size=TOP_K))
    assert served.outputs == plain_tokens(ASKED, MODEL)
    assert served.num_retracted > 0
    assert served.num_cached > 0
    assert isinstance(pools, HostKvPools)
    assert pools.hot.copied[0] > 2 * pools.hot.copied[1]  # rows come back again and again
    return served


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("size", [TOP_K, TOP_K + 1, 2 * TOP_K, 50])
def test_the_bits_do_not_depend_on_the_size_of_the_buffer(
    size: int, interval: int, smallest: Served
) -> None:
    served, _ = run(HiSparseConfig(device_buffer_size=size, backup_interval=interval))
    assert served.outputs == smallest.outputs
    assert served.logprobs == smallest.logprobs


@pytest.mark.parametrize("seed", range(4))
def test_the_bits_do_not_depend_on_the_time_of_the_backup(
    seed: int, smallest: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows are backed up at random, between none and six forwards later."""
    choice, begin = random.Random(seed), Backup.begin

    def begin_at_random(backup: Backup, *arguments: Any) -> Any:
        if choice.random() < 0.3:
            backup.flush()
        return begin(backup, *arguments)

    monkeypatch.setattr(Backup, "begin", begin_at_random)
    served, _ = run(HiSparseConfig(device_buffer_size=TOP_K, backup_interval=6))
    assert served.outputs == smallest.outputs
    assert served.logprobs == smallest.logprobs


@pytest.mark.parametrize("interval", [1, 3])
def test_the_host_has_the_kv_that_a_device_would_have(interval: int) -> None:
    """All steps are the same without HiSparse, so each page has the same tokens."""
    served, pools = run(HiSparseConfig(backup_interval=interval))
    expected, dense = run(None)
    assert served.outputs == expected.outputs
    assert served.batches == expected.batches
    assert isinstance(pools, HostKvPools)
    pools.backup.flush()
    for index, kv in dense.layers.items():
        own = slice(dense.page_size, None)  # page 0 holds what nobody reads
        torch.testing.assert_close(pools.layers[index].keys[own], kv.keys[own])


def test_a_chunk_reads_the_row_that_a_chunk_of_one_token_left_behind() -> None:
    """Beside two decodes a prompt comes token by token, as a decode does; when they end, the rest
    comes at once, and reads all keys from the host."""
    asked = [
        request(f"r{n}", STEM[3 * n : 3 * n + size], max_tokens=num)
        for n, (size, num) in enumerate([(2, 9), (2, 6), (20, 8)])
    ]
    hisparse = HiSparseConfig(backup_interval=50)
    options: dict[str, Any] = {
        "attention": "torch-ref",
        "max_batched_tokens": 3,
        "depth": 1,
        "lead": 1,
    }
    served = serve(make_executor(MODEL, hisparse=hisparse, **options), asked)
    widths = [array_i32(batch.query_lens).tolist() for batch in served.batches]
    assert [1, 1, 1] in widths
    assert served.outputs == plain_tokens(asked, MODEL)


def test_a_position_that_is_computed_again_has_its_new_latents() -> None:
    """As behind rejected drafts, or after a step that failed."""
    layer, rows = MODEL.layers[0], torch.tensor([2])
    pools = make_pools((layer,), 20, table_shape=(3, 9))
    hot = HotRows(pools.layers, HotShape(2, TOP_K, 3), CpuDevice().zeros, copy_rows)
    for number, position in enumerate((0, 1, 2, 1)):
        here = torch.tensor([position])
        hot.begin(rows, here)
        latents = torch.full((1, 1, layer.head_dim), float(number), dtype=torch.float64)
        hot.write(layer, rows, here, latents)
    found = hot.swap_in(layer, rows, torch.tensor([[0, 1, NOWHERE]]), torch.tensor([[7, 7, 7]]))
    assert hot.kv(layer).keys[found[0, :2], 0, 0].tolist() == [0.0, 3.0]
    assert hot.copied.tolist() == [0, 0]


class LruModel:
    """The hot rows of one request, in the order of their last use; the new token is used last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: list[int] = []
        self.num_copied = 0

    def step(self, new: int, chosen: int) -> None:
        self.held = [*self.held, new][-self.size :]
        if chosen not in self.held:
            self.num_copied += 1
            self.held = self.held[-self.size + 1 :]
        self.held = [each for each in self.held if each not in (chosen, new)]
        self.held += [chosen, new] if chosen != new else [new]


@given(st.lists(st.lists(st.integers(0, 30), min_size=2, max_size=2), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_swaps_are_those_of_a_least_recently_used_cache(seeds: list[list[int]]) -> None:
    """Two rows, each of which chooses one earlier key in each step."""
    num_hot, layer, rows = 3, MODEL.layers[0], torch.tensor([1, 2])
    pools = make_pools((layer,), 20, table_shape=(3, 9))
    hot = HotRows(pools.layers, HotShape(2, num_hot, 1), CpuDevice().zeros, copy_rows)
    caches = [LruModel(num_hot + 1), LruModel(num_hot + 1)]
    latents = torch.zeros(2, 1, layer.head_dim, dtype=torch.float64)
    for step, seed in enumerate(seeds):
        chosen = torch.tensor([each % (step + 1) for each in seed])
        kv_lens, slots = torch.tensor([step, step]), rows * 20 + step
        hot.begin(rows, kv_lens)
        latents[:, 0, 0] = slots.double()
        places = hot.write(layer, rows, kv_lens, latents)
        positions = torch.stack((chosen, torch.tensor([NOWHERE, NOWHERE])), dim=1)
        found = hot.swap_in(layer, rows, positions, positions + rows[:, None] * 20)
        assert hot.kv(layer).keys[found[:, 0], 0, 0].tolist() == (chosen + rows * 20).tolist()
        hot.back_up(0, places, slots)
        for cache, position in zip(caches, chosen.tolist(), strict=True):
            cache.step(step, position)
    num_copied = sum(cache.num_copied for cache in caches)
    assert hot.copied.tolist() == [num_copied, 2 * len(seeds)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"device_buffer_size": 4}', "device_buffer_size must be at least the model's top_k .5."),
        ('{"top_k": 6}', "top_k is 6, but the model's queries attend to 5 keys"),
        ('{"backup_interval": 0}', "backup_interval at least 1"),
        ('{"buffer": 6}', "unknown field"),
        ("[]", "expected a JSON object such as"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HiSparseConfig.of(text).num_hot(MODEL.layers)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_executor(HashModel(), hisparse=HiSparseConfig()), "with sparse attention"),
        (lambda: run(HiSparseConfig(), two_batches=True), "does not support --enable-two-batch"),
        (
            lambda: make_executor(MODEL, hisparse=HiSparseConfig(), drafter=ReadingDraft()),
            "a drafter that reads the model's KV",
        ),
    ],
)
def test_b29_what_hisparse_cannot_be_beside_is_refused(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


class ReadingDraft(HiddenModules):
    """It has no KV, and reads that of the model's first layer."""

    def __init__(self) -> None:
        super().__init__(1)
        self.layers = (msgspec.structs.replace(self.layers[0], index=7, kv_layer=0),)


def test_a_drafter_has_its_kv_on_the_device_whatever_is_in_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, in_host = CpuDevice(), list[Tensor]()

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        in_host.append(device.zeros(shape, dtype))
        return in_host[-1]

    memory = HostMemory(zeros, copy_rows, is_shared=True)
    monkeypatch.setattr("aserve.gpu.build.host_memory", lambda _device: memory)
    found: list[Any] = []
    for config in (None, HiSparseConfig(device_buffer_size=TOP_K)):
        modules = HiddenModules(3)
        mode = Speculative(MultiLayer(modules.modules, hidden_size=32, inputs=AFTER_NORM))
        executor = make_executor(
            MODEL, mode=mode, drafter=modules, attention="torch-ref", hisparse=config
        )
        served = serve(executor, ASKED[:1])
        found.append((served.outputs, len(served.batches)))
        found.append(pool_kv(executor, text_of(ASKED[0], served)))
        assert served.outputs == plain_tokens(ASKED[:1], MODEL)
    torch.testing.assert_close(found[:2], found[2:], rtol=0, atol=0)
    assert [tuple(each.shape) for each in in_host] == [
        tuple(pools_of(executor).pools_of(0)[0].shape)
    ]


LAYOUT = GroupLayout("full", None, 2, 1, 576, 2, is_latent=True, index_bytes_per_token=512)


@pytest.mark.parametrize(
    ("is_shared", "ratio", "host_bytes", "num_tokens"),
    [
        (True, 2.0, 0, 1_000_000 // (2304 + 516)),  # host and device are one memory
        (False, 100.0, 1 << 40, 1_000_000 // 516),  # index keys and token ids fill the device
        (False, 2.0, 1 << 40, 2_000_000 // 2304),  # the ratio is the limit
        (False, 2.0, 1_000_000, 500_000 // 2304),  # the host's free memory is
    ],
)
def test_pages_fit_in_the_memory_of_both(
    is_shared: bool,
    ratio: float,
    host_bytes: int,
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aserve.gpu.hisparse.memory.available_memory_bytes", lambda: host_bytes)
    shape = HotShape(max_rows=3, num_hot=9, num_pending=1)
    hot_bytes = 4 * 10 * (2304 + 2 * 16)
    memory = HostMemory(CpuDevice().zeros, copy_rows, is_shared=is_shared)
    budget = kv_budget(1_000_000 + hot_bytes, LAYOUT, shape=shape, ratio=ratio, memory=memory)
    assert budget // LAYOUT.bytes_per_page(1) == num_tokens


def test_steps_over_kv_in_the_hosts_memory_are_never_captured() -> None:
    """The clock, and the queue of rows to back up, are the host's."""
    device, hisparse = GraphDevice(), HiSparseConfig(device_buffer_size=8)
    executor = make_executor(
        MODEL, device=device, attention="torch-ref", debug_checks=False, hisparse=hisparse
    )
    served = serve(captured(executor), ASKED)
    assert served.outputs == plain_tokens(ASKED, MODEL)
    assert device.num_captures == 0
