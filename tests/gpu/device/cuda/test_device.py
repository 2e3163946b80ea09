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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.cuda.ops import prepare_invariant
from aserve.gpu.device.cuda.runtime import Memory
from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.layer_groups import group_layers
from aserve.gpu.models.base import Attend, CausalModel, HiddenCapture
from aserve.gpu.sampling.ops import SHAPED_OPS
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.transfer.pinned import PinnedSlots
from aserve.gpu.weights.format import WeightRequest
from aserve.messages.base import array_i32
from aserve.messages.results import StepResult
from tests.fakes.cuda import Event, FakeCuda, Stream
from tests.fakes.gated_model import TIMEOUT_S
from tests.fakes.hash_model import HashModel
from tests.fakes.toy_device import TOY
from tests.fakes.two_token_mode import TwoTokens
from tests.gpu.batch_builder import BatchBuilder
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs
from tests.gpu.prompt_checks import assert_prompt
from tests.gpu.test_traces import Trace, assert_plain, serve_trace, traces

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
    executor.start(asyncio.get_running_loop())
    try:
        builder = BatchBuilder(executor.spec)
        batches = [builder.batch({2: PROMPT}, sampling=[2])]
        batches += [builder.batch({2: [-2]}, sampling=[2]) for _ in range(5)]
        tickets = [executor.launch(batch) for batch in batches]
        await all_is_asked(executor)
        cuda.lets_host_go.set()
        return [await unless_dead(executor, ticket.outcome) for ticket in tickets]
    finally:
        cuda.lets_host_go.set()
        executor.close()


async def all_is_asked(executor: TorchExecutor) -> None:
    """The executor thread has gone through all that was launched."""
    loop = asyncio.get_running_loop()
    is_through: asyncio.Future[None] = loop.create_future()

    def say_so() -> None:
        loop.call_soon_threadsafe(is_through.set_result, None)

    executor._inbox.put(say_so)
    await unless_dead(executor, is_through)


async def unless_dead(executor: TorchExecutor, future: asyncio.Future[Any]) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.wait((future, executor.died), return_when=asyncio.FIRST_COMPLETED)
    if executor.died.done():
        raise executor.died.result()
    return future.result()


def tokens_of(outcomes: list[object]) -> list[int]:
    results = [outcome for outcome in outcomes if isinstance(outcome, StepResult)]
    return [int(token) for result in results for token in array_i32(result.tokens)]


# ---------------------------------------------------------------- the engine's steps


@pytest.mark.parametrize("seed", [None, 1, 2])
async def test_steps_that_run_far_behind_give_the_plain_engines_tokens(seed: int | None) -> None:
    cuda = FakeCuda(seed)
    outcomes = await run_ahead(cuda, executor_on(cuda))
    assert tokens_of(outcomes) == PLAIN[:6]
    cuda.assert_sound()
    assert cuda.num_synchronised == 0


@pytest.mark.parametrize("seed", [None, 1])
async def test_replays_that_run_far_behind_give_the_plain_engines_tokens(seed: int | None) -> None:
    """Trap 7: each result is copied before the next replay overwrites it."""
    cuda = FakeCuda(seed)
    executor = executor_on(cuda, graph_rows=2)
    executor.capture_graphs(lambda _done, _total: None)
    assert tokens_of(await run_ahead(cuda, executor)) == PLAIN[:6]
    cuda.assert_sound()
    assert cuda.num_replays == 5


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 6])
def test_no_kind_of_step_asks_the_device_for_a_value(window: int | None) -> None:
    """What asks has no answer here, so its step would fail."""
    filters: dict[str, Any] = {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.05}
    penalties: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
    }
    biases: dict[str, Any] = {"logit_bias": ((5, 4.0), (3, -100.0)), "min_tokens": 2}
    asked = [
        request("greedy", PROMPT),
        request("sampled", PROMPT, temperature=0.8, n=2),
        request("filtered", PROMPT[:4], **filters),
        request("penalised", PROMPT, **penalties),
        request("nudged", PROMPT[:5], end_ids=(3, 8), **biases),
        request("banned", PROMPT, bad_word_ids=((5,), (7, 2)), allowed_token_ids=(2, 5, 7, 11)),
        request("scored", PROMPT, logprobs=3, prompt_logprobs=2),
        request("held", PROMPT, grammar=TOY, temperature=0.7),
        request("embedded", PROMPT, embeds=True),
    ]
    cuda = FakeCuda()
    model = functools.partial(HashModel, window=window)
    executor = executor_on(cuda, lambda where: model(device=where), max_batched_tokens=16)
    served = serve(executor, asked)
    cuda.assert_sound()
    assert (served.num_resyncs, cuda.num_synchronised) == (0, 0)
    for each in asked:
        for child in range(each.sampling.n):
            tokens = served.outputs.get((each.request_id, child), [])
            assert tokens == plain_outputs(model(), each, child)
            assert_prompt(model(), each, child, served)


@pytest.mark.slow
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(traces(), st.none() | st.integers(0, 2**32))
def test_any_trace_is_sound_on_streams_and_gives_the_plain_engines_tokens(
    trace: Trace, seed: int | None
) -> None:
    cuda = FakeCuda(seed)
    options = trace.options | {"attention": "torch-ref"}
    executor = executor_on(
        cuda,
        trace.model,
        mode=TwoTokens() if trace.two_tokens else Autoregressive(),
        **options,
    )
    if trace.captures_at_start:
        executor.capture_graphs(lambda _done, _total: None)
    served = serve_trace(executor, trace)
    cuda.assert_sound()
    assert_plain(trace, served)
    if not trace.options["graph_rows"]:  # a capture waits for the device
        assert cuda.num_synchronised == 0


# ---------------------------------------------------------------- broken on purpose


def forgets_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)


def tells_the_allocator_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCuda, "keep", lambda self, tensor, stream: None)


def gives_slots_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    take = PinnedSlots.take

    def take_and_give_back(self: PinnedSlots, num_words: int) -> Any:
        slot = take(self, num_words)
        self.give_back(slot)
        return slot

    monkeypatch.setattr(PinnedSlots, "take", take_and_give_back)


def waits_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_out = CudaDevice.copy_out

    def copy_out_and_wait(self: CudaDevice, values: Tensor, host: Tensor) -> Any:
        event = copy_out(self, values, host)
        event.synchronize()
        return event

    monkeypatch.setattr(CudaDevice, "copy_out", copy_out_and_wait)


def stages_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 8."""

    def pageable(_self: CudaDevice, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    monkeypatch.setattr(CudaDevice, "host_buffer", pageable)


def begins_before_the_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_stream", lambda self, stream: None)


@pytest.mark.parametrize(
    ("break_it", "hazard"),
    [
        (forgets_to_wait, "a copy on stream 2 races the write of"),
        (tells_the_allocator_nothing, "is given back while stream 2 may still use it"),
        (gives_slots_back_at_once, "is used again before its event"),
        (waits_in_the_step, "the host waits for an event inside a step"),
        (stages_pageable_memory, "inside a step: the host waits"),
        (begins_before_the_model_is_there, "on stream 1 races the write of"),
    ],
)
async def test_what_is_broken_is_seen(
    break_it: Callable[[pytest.MonkeyPatch], None], hazard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    cuda = FakeCuda()
    await run_ahead(cuda, executor_on(cuda))
    with pytest.raises(AssertionError, match=hazard):
        cuda.assert_sound()


async def test_who_reads_before_the_event_reads_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    cuda = FakeCuda()
    assert tokens_of(await run_ahead(cuda, executor_on(cuda))) != PLAIN[:6]


class Asks(HashModel):
    """A model whose forward wants to know a value of the device."""

    def __init__(self, ask: Callable[[Tensor], object], device: torch.device) -> None:
        super().__init__(device=device)
        self._ask = ask

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        self._ask(logits)
        return logits


@pytest.mark.parametrize(
    "ask",
    [
        lambda logits: bool(logits[0, 0] > 0),
        lambda logits: logits[0, 0].item(),
        lambda logits: logits[logits > 0],
        lambda logits: logits.nonzero(),
        lambda logits: logits.cpu(),
        lambda logits: logits.tolist(),
        lambda logits: logits + torch.tensor([1.0], device=logits.device),
        lambda logits: logits + torch.ones(1).to(logits.device),
        lambda logits: logits[torch.tensor([0])],
    ],
)
async def test_a_step_that_waits_for_a_value_fails(ask: Callable[[Tensor], object]) -> None:
    cuda = FakeCuda()
    outcomes = await run_ahead(cuda, executor_on(cuda, lambda where: Asks(ask, where)))
    assert tokens_of(outcomes) == []


# ---------------------------------------------------------------- failures of the device


async def test_a_device_that_a_kernel_has_ruined_ends_the_engine_and_says_why() -> None:
    cuda = FakeCuda()

    def ruin(_logits: Tensor) -> None:
        cuda.break_down("an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError, match="an illegal memory access"):
        await run_ahead(cuda, executor_on(cuda, lambda where: Asks(ruin, where)))


async def test_a_device_that_is_ruined_while_the_host_waits_ends_the_engine() -> None:
    cuda = FakeCuda()
    executor = executor_on(cuda)
    cuda.lets_host_go.clear()
    executor.start(asyncio.get_running_loop())
    try:
        executor.launch(BatchBuilder(executor.spec).batch({2: PROMPT}, sampling=[2]))
        await all_is_asked(executor)
        cuda.break_down("an illegal memory access was encountered")
        cuda.lets_host_go.set()
        reason = await asyncio.wait_for(executor.died, TIMEOUT_S)
    finally:
        cuda.lets_host_go.set()
        executor.close()
    assert isinstance(reason, torch.AcceleratorError)


def out_of_memory(_logits: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_request_for_which_there_is_never_memory_fails_alone() -> None:
    cuda = FakeCuda()
    asked = [request(f"r{number}", PROMPT[: number + 1]) for number in range(2)]
    served = serve(executor_on(cuda, lambda where: Asks(out_of_memory, where)), asked)
    assert served.reasons == {("r0", 0): ["error"], ("r1", 0): ["error"]}
    cuda.assert_sound()


def test_memory_that_runs_out_while_capturing_costs_graphs_and_no_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda = FakeCuda()

    def fill(logits: Tensor) -> None:
        if cuda.current_stream().graph is not None:
            out_of_memory(logits)

    asked = [request(f"r{number}", PROMPT[: number + 5]) for number in range(2)]
    executor = executor_on(cuda, lambda where: Asks(fill, where), graph_rows=2)
    with caplog.at_level(logging.WARNING, logger="aserve.gpu.cudagraph.graphs"):
        executor.capture_graphs(lambda _done, _total: None)
        served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}
    assert cuda.num_replays == 0
    cuda.assert_sound()
    warnings = [record.getMessage() for record in caplog.records]
    assert ["rows failed: OutOfMemoryError" in warning for warning in warnings] == [True] * 3


# ---------------------------------------------------------------- memory


class Notes(HashModel):
    """How many tokens each forward has, and how many logits are made at once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)
        self.num_tokens: list[int] = []
        self.num_logits: list[int] = []

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        self.num_tokens.append(len(input_ids))
        return super().forward(input_ids, positions, attend, capture=capture)

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_logits.append(len(hidden))
        return super().logits(hidden)


async def test_kv_gets_what_the_largest_step_leaves_of_the_share() -> None:
    cuda = FakeCuda()
    total = 1000 * PAGE_BYTES
    cuda.memory_now = Memory(free=total // 2, total=total)
    cuda.growth_bytes = 360 * PAGE_BYTES
    seen: list[Notes] = []

    def noted(where: torch.device) -> Notes:
        seen.append(Notes(where))
        return seen[0]

    executor = executor_on(cuda, noted, num_pages=None, memory_share=0.9)
    # 900 in all, 500 are in use, and 360 are for steps.
    assert executor.spec.groups[0].num_pages == 40
    # The budget in one prompt, and shared by 5 rows; then what is drawn from logits as they are.
    assert seen[0].num_tokens == [64, 60, 1, 1]
    assert seen[0].num_logits == [1, 5, 1, 1]
    assert tokens_of(await run_ahead(cuda, executor)) == PLAIN[:6]
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


def test_a_share_that_leaves_nothing_for_kv_says_what_takes_it() -> None:
    cuda = FakeCuda()
    cuda.memory_now = Memory(free=2 << 30, total=10 << 30)
    cuda.growth_bytes = 1 << 30
    match = (
        r"--gpu-memory-utilization 0.9 of 10.00 GiB leaves nothing for KV: 8.00 GiB are in use, "
        r"and the largest step takes 1.00 more; give a larger share, lower --max-num-batched-tokens"
    )
    with pytest.raises(ConfigError, match=match):
        executor_on(cuda, num_pages=None)


def test_a_largest_step_without_memory_says_which_option_to_change() -> None:
    match = "lower --max-num-batched-tokens 64 or --max-num-seqs 5, .*: CUDA out of memory"
    with pytest.raises(ConfigError, match=match):
        executor_on(FakeCuda(), lambda where: Asks(out_of_memory, where), num_pages=None)


def test_kv_without_memory_says_which_option_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(_self: CudaDevice, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(CudaDevice, "zeros", zeros)
    with pytest.raises(
        ConfigError, match=r"lower --num-pages or --gpu-memory-utilization, .*: CUDA"
    ):
        executor_on(FakeCuda(), num_pages=65)


# ---------------------------------------------------------------- what is chosen


def test_steps_are_as_large_as_the_device_likes_unless_someone_says_otherwise() -> None:
    spec = executor_on(FakeCuda(), max_rows=None, max_batched_tokens=None).spec
    assert (spec.max_rows, spec.max_batched_tokens) == (256, 8192)
    spec = make_executor(HashModel(), max_rows=None, max_batched_tokens=7).spec
    assert (spec.max_rows, spec.max_batched_tokens) == (64, 7)


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
    assert CudaDevice(cuda).weight_format(WeightRequest("auto", stored, 1)).dtype == chosen
    assert (
        CudaDevice(cuda).weight_format(WeightRequest("float32", stored, 1)).dtype == torch.float32
    )


def test_quantization_of_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--quantization int8 is made for the CPU"):
        CudaDevice(FakeCuda()).weight_format(WeightRequest("auto", None, 1, "int8"))


def test_deterministic_products_have_fixed_tiles_and_no_float64() -> None:
    device = CudaDevice(FakeCuda())
    format_ = device.weight_format(WeightRequest("auto", "bfloat16", 1, is_deterministic=True))
    assert format_.prepare is prepare_invariant
    assert format_.about == "bfloat16 (auto: as it is stored), in fixed tiles"
    with pytest.raises(ConfigError, match="not in float64"):
        device.weight_format(WeightRequest("float64", None, 1, is_deterministic=True))
