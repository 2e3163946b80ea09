"""The CUDA device under the executor, on a runtime that says what would be a race on a GPU."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.cudagraph.graphs import StepGraph, StepGraphs
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import DecodeMode, OnPublish, StepRunner
from aserve.gpu.device.base import Captured, slice_len_of
from aserve.gpu.device.cuda import ops
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.cuda.ops import prepare_invariant
from aserve.gpu.device.cuda.runtime import Memory, pinned_zeros
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.layer_groups import group_layers
from aserve.gpu.layers.linear import Linear
from aserve.gpu.models.base import CausalModel
from aserve.gpu.sampling.ops import SHAPED_OPS
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.spec.base import DraftRows, Drafts
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.results import Packed
from aserve.gpu.weights.format import WeightRequest
from aserve.messages.results import StepResult
from aserve_kernels.few_rows_linear import FEW_ROWS, few_rows_linear
from tests.fakes.cuda import Event, FakeCuda, Stream
from tests.fakes.drafters import Stumbling, speculative
from tests.fakes.gated_model import TIMEOUT_S
from tests.fakes.hash_model import HashModel
from tests.gpu.batch_builder import running, tokens_of
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs, plain_tokens
from tests.kernels.tolerance import draw

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
PAGE_BYTES = group_layers(HashModel().layers)[0].layout(8).bytes_per_page(4)
PLAIN = plain_outputs(HashModel(), request("plain", PROMPT))


def executor_on(
    cuda: FakeCuda,
    model_on: Callable[[torch.device], CausalModel] = lambda where: HashModel(device=where),
    *,
    mode: DecodeMode | None = None,
    **options: Any,
) -> TorchExecutor:
    with cuda:
        device = CudaDevice(cuda)
        options = {"attention": "torch-ref", "graph_rows": 0, **options}
        return make_executor(model_on(cuda.torch_device), mode=mode, device=device, **options)


async def run_ahead(cuda: FakeCuda, executor: TorchExecutor) -> list[object]:
    """A prefill and decodes, all asked of the device before the host waits for the first one."""
    cuda.lets_host_go.clear()
    async with running(executor) as builder:
        try:
            batches = [builder.batch({2: PROMPT}, sampling=[2])]
            batches += [builder.batch({2: [-2]}, sampling=[2]) for _ in range(5)]
            tickets = [executor.launch(batch) for batch in batches]
            await all_is_asked(executor)
        finally:
            cuda.lets_host_go.set()
        return [await unless_dead(executor, ticket.outcome) for ticket in tickets]


async def all_is_asked(executor: TorchExecutor) -> None:
    """The executor thread has gone through all that was launched."""
    loop = asyncio.get_running_loop()
    is_through: asyncio.Future[None] = loop.create_future()

    def say_so() -> None:
        loop.call_soon_threadsafe(is_through.set_result, None)

    executor._threads.jobs.put(say_so)
    await unless_dead(executor, is_through)


async def unless_dead(executor: TorchExecutor, future: asyncio.Future[Any]) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.wait((future, executor.died), return_when=asyncio.FIRST_COMPLETED)
    if executor.died.done():
        raise executor.died.result()
    return future.result()


def all_tokens(outcomes: list[object]) -> list[int]:
    results = [outcome for outcome in outcomes if isinstance(outcome, StepResult)]
    return [token for result in results for token in tokens_of(result)]


# ---------------------------------------------------------------- the engine's steps


@pytest.mark.parametrize("graph_rows", [0, 2])
@pytest.mark.parametrize("seed", [None, 1])
async def test_steps_that_run_far_behind_give_the_plain_engines_tokens(
    seed: int | None, graph_rows: int
) -> None:
    """Trap 7: the result of a replay is copied before the next replay overwrites it."""
    cuda = FakeCuda(seed)
    executor = executor_on(cuda, graph_rows=graph_rows)
    assert all_tokens(await run_ahead(cuda, captured(executor))) == PLAIN[:6]
    cuda.assert_sound()
    if graph_rows:
        assert cuda.num_replays == 5
    else:
        assert cuda.num_synchronised == 0


# ---------------------------------------------------------------- broken on purpose


def forgets_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)


def stages_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def pageable(_self: CudaDevice, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    monkeypatch.setattr(CudaDevice, "host_buffer", pageable)


def copies_no_result_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(
        _graphs: StepGraphs, graph: StepGraph, _plan: StepPlan, publish: OnPublish
    ) -> Packed:
        return Packed(graph.captured.replay(publish), graph.layout)

    monkeypatch.setattr(StepGraphs, "replay", replay)


@pytest.mark.parametrize(
    ("break_it", "graph_rows", "hazard"),
    [
        (forgets_to_wait, 0, "a copy on stream 2 races the write of"),
        # Trap 8
        (stages_pageable_memory, 0, "inside a step: the host waits"),
        # Trap 7
        (copies_no_result_of_a_replay, 1, "on stream 1 races a read of"),
    ],
)
async def test_what_is_broken_is_seen(
    break_it: Callable[[pytest.MonkeyPatch], None],
    graph_rows: int,
    hazard: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    cuda = FakeCuda()
    await run_ahead(cuda, captured(executor_on(cuda, graph_rows=graph_rows)))
    with pytest.raises(AssertionError, match=hazard):
        cuda.assert_sound()


async def test_who_reads_before_the_event_reads_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    cuda = FakeCuda()
    assert all_tokens(await run_ahead(cuda, executor_on(cuda))) != PLAIN[:6]


class Asks(HashModel):
    """A model whose forward wants to know a value of the device."""

    def __init__(self, ask: Callable[[Tensor], object], device: torch.device) -> None:
        super().__init__(device=device)
        self._ask = ask

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        self._ask(logits)
        return logits


# ---------------------------------------------------------------- failures of the device


async def test_a_device_that_a_kernel_has_ruined_ends_the_engine_and_says_why() -> None:
    cuda = FakeCuda()

    def ruin(_logits: Tensor) -> None:
        cuda.break_down("an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError, match="an illegal memory access"):
        await run_ahead(cuda, executor_on(cuda, lambda where: Asks(ruin, where)))


async def test_a_device_that_is_ruined_while_the_host_waits_ends_the_engine() -> None:
    cuda = FakeCuda()
    cuda.lets_host_go.clear()
    executor = executor_on(cuda)
    async with running(executor) as builder:
        try:
            executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
            await all_is_asked(executor)
            cuda.break_down("an illegal memory access was encountered")
        finally:
            cuda.lets_host_go.set()
        reason = await asyncio.wait_for(executor.died, TIMEOUT_S)
    assert isinstance(reason, torch.AcceleratorError)


def out_of_memory(_logits: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_request_for_which_there_is_never_memory_fails_alone() -> None:
    cuda = FakeCuda()
    asked = [request(f"r{number}", PROMPT[: number + 1]) for number in range(2)]
    served = serve(executor_on(cuda, lambda where: Asks(out_of_memory, where)), asked)
    assert served.reasons == {("r0", 0): ["error"], ("r1", 0): ["error"]}
    cuda.assert_sound()


@pytest.mark.parametrize(
    ("mode", "num_logits"), [(Autoregressive(), 1), (speculative(Stumbling(1, every=2)), 3)]
)
def test_memory_that_runs_out_while_capturing_costs_graphs_and_no_token(
    mode: DecodeMode, num_logits: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With drafts it runs out behind the graph break, in the first captures. A capture left open
    would fail the next one with another error.
    """
    cuda = FakeCuda()
    num_captured = 0

    def fill(logits: Tensor) -> None:
        nonlocal num_captured
        num_captured += cuda.current_stream().graph is not None
        if num_captured == num_logits:
            num_captured = 0
            out_of_memory(logits)

    asked = [request(f"r{number}", PROMPT[: number + 5]) for number in range(2)]
    executor = executor_on(cuda, lambda where: Asks(fill, where), mode=mode, graph_rows=2)
    with caplog.at_level(logging.WARNING, logger="aserve.gpu.cudagraph.graphs"):
        served = serve(captured(executor), asked)
    assert served.outputs == plain_tokens(asked)
    assert cuda.num_replays == 0 or num_logits > 1
    cuda.assert_sound()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) >= 3
    assert all("capturing one failed: OutOfMemoryError" in warning for warning in warnings)


# ---------------------------------------------------------------- memory


def adding(device: CudaDevice, number: float) -> Captured:
    own = torch.full((1,), number, device=device.torch_device)
    return device.capture(lambda _break: own + 1)


def test_what_a_captured_function_reads_stays_where_it_is_until_the_capture_goes() -> None:
    cuda = FakeCuda()
    device = CudaDevice(cuda)
    with torch.inference_mode(), device.stream():
        result = adding(device, 5.0).replay(lambda _values: None)
    assert cuda.read(result).tolist() == [6.0]


async def test_kv_gets_what_the_largest_step_leaves_of_the_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda()
    total = 1000 * PAGE_BYTES
    cuda.memory_now = Memory(free=total // 2, total=total)
    cuda.growth_bytes = 360 * PAGE_BYTES
    num_tokens: list[int] = []
    num_logits: list[int] = []
    forward = HashModel.forward

    def noted(model: HashModel, input_ids: Tensor, *given: Any, **more: Any) -> Tensor:
        num_tokens.append(len(input_ids))
        return forward(model, input_ids, *given, **more)

    monkeypatch.setattr(HashModel, "forward", noted)
    asks = functools.partial(Asks, lambda logits: num_logits.append(len(logits)))
    executor = executor_on(cuda, asks, num_pages=None, memory_share=0.9)
    # 900 in all, 500 are in use, and 360 are for steps.
    assert executor.spec.groups[0].num_pages == 40
    # The budget in one prompt, and shared by 5 rows; then what is drawn from logits as they are.
    assert num_tokens == [64, 60, 1, 1]
    assert num_logits == [1, 5, 1, 1]
    assert all_tokens(await run_ahead(cuda, executor)) == PLAIN[:6]
    cuda.assert_sound()


def test_every_kind_of_draw_is_run_before_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has kernels of its own, which are compiled then."""
    kinds: list[tuple[bool, bool, bool]] = []

    def draw(
        logits: Tensor, rows: LogitsRows, tables: RowTables, plan: SamplePlan
    ) -> tuple[Tensor, Tensor]:
        kinds.append((plan.needs_noise, plan.needs_filter, plan.adds_to_logits))
        return SHAPED_OPS.draw(logits, rows, tables, plan)

    ops = dataclasses.replace(SHAPED_OPS, draw=draw)
    monkeypatch.setattr(CudaDevice, "ops", lambda *_given, **_more: DeviceOps(sample_ops=ops))
    executor_on(FakeCuda(), num_pages=None)
    most = (True, True, True)
    assert kinds == [most, most, (True, True, False), (True, False, False)]


def test_the_largest_steps_have_windows_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafts and their verification take is not left for KV."""
    seen: list[tuple[int, int]] = []
    draft = Stumbling.draft

    def noted(self: Stumbling, runner: StepRunner, rows: DraftRows) -> Drafts:
        seen.append((len(rows.rows), rows.num_drafts))
        return draft(self, runner, rows)

    monkeypatch.setattr(Stumbling, "draft", noted)
    executor_on(FakeCuda(), mode=speculative(Stumbling(3)), num_pages=None, max_rows=4)
    assert seen == [(4, 3)]


class FakeDriver:
    """Registers memory, or refuses to."""

    def __init__(self, error: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self._error = error

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        self.registered[address] = size
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_the_host_pins_no_more_than_is_asked_for_and_as_long_as_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    zeros = pinned_zeros((5, 7), torch.bfloat16)
    assert not zeros.any()
    assert driver.registered == {zeros.data_ptr(): 70}
    part = zeros[2:]
    del zeros
    assert len(driver.registered) == 1
    del part
    assert driver.registered == {}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeDriver(error=2))
    with pytest.raises(ConfigError, match=r"cannot pin 70 bytes \(CUDA error 2\); lower what"):
        pinned_zeros((5, 7), torch.bfloat16)


@pytest.mark.parametrize(("vocab_size", "slice_len"), [(10, 100), (9, 110), (999, 1), (2000, 1)])
def test_slices_of_logits_begin_at_even_rows(vocab_size: int, slice_len: int) -> None:
    device = CudaDevice(FakeCuda())
    device.logits_elements = 1000
    assert slice_len_of(device, vocab_size=vocab_size) == slice_len


def no_zeros(_device: CudaDevice, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_memory_that_is_not_there_says_which_option_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda()
    cuda.memory_now = Memory(free=2 << 30, total=10 << 30)
    cuda.growth_bytes = 1 << 30
    match = (
        r"--gpu-memory-utilization 0.9 of 10.00 GiB leaves nothing for KV: 8.00 GiB are in use, "
        r"and the largest step takes 1.00 more; give a larger share, lower --max-num-batched-tokens"
    )
    with pytest.raises(ConfigError, match=match):
        executor_on(cuda, num_pages=None)
    match = "lower --max-num-batched-tokens 64 or --max-num-seqs 5, .*: CUDA out of memory"
    with pytest.raises(ConfigError, match=match):
        executor_on(FakeCuda(), lambda where: Asks(out_of_memory, where), num_pages=None)
    monkeypatch.setattr(CudaDevice, "zeros", no_zeros)
    match = r"lower --num-pages, --max-num-seqs or --gpu-memory-utilization, .*: CUDA"
    with pytest.raises(ConfigError, match=match):
        executor_on(FakeCuda(), num_pages=65)


# ---------------------------------------------------------------- what is chosen


@pytest.mark.parametrize(
    ("stored", "has_bfloat16", "chosen"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("float16", True, torch.float16),
        ("float32", True, torch.bfloat16),
        (None, True, torch.bfloat16),
        ("bfloat16", False, torch.float16),
        ("float32", False, torch.float16),
    ],
)
def test_auto_is_the_half_type_that_is_stored_if_the_device_has_it(
    stored: str | None, has_bfloat16: bool, chosen: torch.dtype
) -> None:
    cuda = FakeCuda()
    cuda.has_bfloat16 = has_bfloat16
    device = CudaDevice(cuda)
    assert device.weight_format(WeightRequest("auto", stored, 1)).dtype == chosen
    assert device.weight_format(WeightRequest("float32", stored, 1)).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_few_tokens_of_sixteen_bits_have_a_product_of_their_own(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The libraries' tiles of 16 tokens would be mostly empty. Its result is that of many."""
    seen: list[int] = []

    def noted(x: Tensor, *weights: Any) -> Tensor:
        seen.append(len(x))
        return few_rows_linear(x, *weights)

    monkeypatch.setattr(ops, "few_rows_linear", noted)
    form = CudaDevice(FakeCuda()).weight_format(WeightRequest(dtype, None, 1))
    linear = Linear(draw(40, 70, seed=1) / 8, draw(40, seed=2))
    layer = form.prepare(linear, torch.device("cpu"), dtype=form.dtype)
    x = draw(FEW_ROWS + 1, 70).to(form.dtype)
    torch.testing.assert_close(layer(x[1:]), layer(x)[1:], rtol=2e-2, atol=2e-2)
    layer(x.t().contiguous().t()[:1])  # rows that are not contiguous
    assert seen == ([] if dtype == "float32" else [FEW_ROWS, 1])


def test_deterministic_products_have_fixed_tiles_and_no_float64() -> None:
    device = CudaDevice(FakeCuda())
    format_ = device.weight_format(WeightRequest("auto", "bfloat16", 1, is_deterministic=True))
    assert format_.prepare is prepare_invariant
    assert format_.about == "bfloat16 (auto: as it is stored), in fixed tiles"
    with pytest.raises(ConfigError, match="not in float64"):
        device.weight_format(WeightRequest("float64", None, 1, is_deterministic=True))
