"""The executor thread: results in order, failing steps as values, and a loop that never waits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.errors import EngineDead, StepError
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import DecodeMode, OnPublish, StepRunner
from aserve.gpu.device.base import Device
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.base import CausalModel
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.step.results import Packed
from aserve.messages.base import array_i32
from aserve.messages.results import SampleResult, StepFailed, StepResult
from aserve.messages.step import Resync, Sample
from tests.fakes.gated_model import Gate, HookedModel
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.late_device import LateDevice
from tests.gpu.batch_builder import BatchBuilder, greedy
from tests.gpu.drive import make_executor, request
from tests.gpu.plain_engine import plain_outputs

DEADLINE_S = 30.0
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
PLAIN = plain_outputs(HashModel(), request("plain", PROMPT))


@asynccontextmanager
async def running(
    model: CausalModel | None = None,
    *,
    mode: DecodeMode | None = None,
    device: Device | None = None,
    **options: Any,
) -> AsyncIterator[tuple[TorchExecutor, BatchBuilder]]:
    executor = make_executor(model or HashModel(), mode=mode, device=device, **options)
    executor.start(asyncio.get_running_loop())
    try:
        yield executor, BatchBuilder(executor.spec)
    finally:
        executor.close()


def tokens_of(outcome: object) -> list[int]:
    assert isinstance(outcome, StepResult | SampleResult), outcome
    return array_i32(outcome.tokens).tolist()


# ---------------------------------------------------------------- results


async def test_steps_complete_in_launch_order_with_the_plain_engines_tokens() -> None:
    """Eight steps are launched before the first result: the relay alone carries the tokens."""
    gate = Gate()
    finished: list[int] = []
    async with running(HookedModel({1: gate})) as (executor, builder):
        prefill = builder.batch({2: PROMPT}, sampling=[2])
        tickets = [executor.launch(prefill)]
        tickets += [executor.launch(builder.batch({2: [-2]}, sampling=[2])) for _ in range(7)]

        async def finish(number: int) -> list[int]:
            tokens = tokens_of(await tickets[number])
            finished.append(number)
            return tokens

        tasks = [asyncio.ensure_future(finish(number)) for number in reversed(range(8))]
        await asyncio.sleep(0)  # all of them wait now, the last one first
        gate.open()
        outputs = await asyncio.gather(*tasks)
    assert finished == list(range(8))
    assert [token for tokens in reversed(outputs) for token in tokens] == PLAIN


async def test_a_row_of_a_ticket_is_its_token_and_its_placeholder() -> None:
    async with running() as (executor, builder):
        ticket = executor.launch(builder.batch({1: [9], 2: PROMPT}, sampling=[1, 2]))
        future = ticket[2]
        assert (future.iteration, future.row, future.placeholder) == (1, 2, -2)
        next_ticket = executor.launch(builder.batch({2: [future.placeholder]}, sampling=[2]))
        assert await future == (PLAIN[0],)
        assert await next_ticket[2] == (PLAIN[1],)


async def test_lengths_come_with_every_step() -> None:
    async with running() as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        lens = await executor.launch(builder.batch({2: [-2], 3: [1, 2]}, sampling=[2])).seq_lens
    assert array_i32(lens.rows).tolist() == [2, 3]
    assert array_i32(lens.lens).tolist() == [len(PROMPT) + 1, 2]


async def test_a_chunked_prompt_gives_the_tokens_of_a_whole_one() -> None:
    async with running() as (executor, builder):
        for start in range(0, 8, 2):
            executor.launch(builder.batch({2: PROMPT[start : start + 2]}, sampling=[]))
        last = executor.launch(builder.batch({2: PROMPT[8:], 1: [7, 7]}, sampling=[2]))
        assert tokens_of(await last) == PLAIN[:1]


async def test_a_held_row_is_sampled_later_under_its_mask_and_its_neighbour_at_once() -> None:
    """The held row's logits outlive the next step, which its neighbour runs meanwhile."""
    allowed = sorted(set(range(VOCAB)) - {PLAIN[0]})
    words = np.zeros(2, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    async with running() as (executor, builder):
        first = executor.launch(builder.batch({1: PROMPT, 2: PROMPT}, sampling=[1], held=[2]))
        second = executor.launch(builder.batch({1: [-1]}, sampling=[1]))
        held = executor.sample(Sample(1, np.array([2], np.int32).tobytes(), words.tobytes()))
        third = executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        outcome = await first
        assert isinstance(outcome, StepResult)
        assert array_i32(outcome.rows).tolist() == [1]
        assert tokens_of(outcome) + tokens_of(await second) == PLAIN[:2]
        sampled = tokens_of(await held)
        assert sampled[0] in allowed
        follows = plain_outputs(HashModel(), request("follows", [*PROMPT, *sampled]))
        assert tokens_of(await third) == follows[:1]


# ---------------------------------------------------------------- failures


def burst() -> NoReturn:
    raise ArithmeticError("burst")


async def test_a_failed_step_fails_all_up_to_the_resync_and_the_next_is_good() -> None:
    """The late ones name another row, with which nothing is wrong."""
    row_3 = np.array([3], np.int32).tobytes()
    async with running(HookedModel({3: burst})) as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        executor.launch(builder.batch({3: PROMPT}, sampling=[], held=[3]))
        failed = executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        sample = executor.sample(Sample(2, row_3, b"\xff" * 8))
        late = executor.launch(builder.batch({4: [5, 6]}, sampling=[4]))
        executor.resync(Resync(5))
        init = greedy(2, prompt_len=len(PROMPT))
        good = executor.launch(builder.batch({2: PROMPT}, sampling=[2], inits=[init]))
        outcomes = [await ticket for ticket in (failed, sample, late)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, StepFailed)]
        assert [(failure.iteration, failure.error.message) for failure in failures] == [
            (3, "ArithmeticError: burst"),
            (2, "an earlier step failed"),
            (4, "an earlier step failed"),
        ]
        assert tokens_of(await good) == PLAIN[:1]
        assert not executor.died.done()


async def test_a_failed_step_fails_its_token_and_its_lengths() -> None:
    async with running(HookedModel({1: burst})) as (executor, builder):
        ticket = executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        with pytest.raises(StepError, match="burst"):
            await ticket[2]
        with pytest.raises(StepError, match="burst"):
            await ticket.seq_lens


async def test_a_row_that_is_not_held_cannot_be_sampled() -> None:
    async with running() as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        rows = np.array([2], np.int32).tobytes()
        outcome = await executor.sample(Sample(1, rows, bytes(8)))
    assert isinstance(outcome, StepFailed)
    assert "rows [2] are sampled, but not held" in outcome.error.message


def with_a_nan(logits: Tensor) -> Tensor:
    logits[1, 5] = torch.nan
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_nan_logits_fail_their_step_and_name_the_row(temperature: float) -> None:
    inits = [greedy(row, temperature=temperature) for row in (1, 4)]
    async with running(HookedModel(spoil={1: with_a_nan})) as (executor, builder):
        ticket = executor.launch(
            builder.batch({1: PROMPT, 4: PROMPT}, sampling=[1, 4], inits=inits)
        )
        outcome = await ticket
        assert isinstance(outcome, StepFailed)
        assert "row 4: no token can be drawn" in outcome.error.message
        later = await executor.launch(builder.batch({1: [-1]}, sampling=[1]))
        assert isinstance(later, StepFailed)
        assert later.error.message == "an earlier step failed"
        executor.resync(Resync(3))
        good = builder.batch({1: PROMPT}, sampling=[1], inits=[greedy(1)])
        assert tokens_of(await executor.launch(good)) == PLAIN[:1]


async def test_a_held_row_cannot_be_sampled_twice() -> None:
    sample = Sample(1, np.array([2], np.int32).tobytes(), b"\xff" * 8)
    async with running() as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[], held=[2]))
        first, second = executor.sample(sample), executor.sample(sample)
        assert tokens_of(await first) == PLAIN[:1]
        assert isinstance(await second, StepFailed)


async def test_a_row_that_was_held_before_a_failure_cannot_be_sampled_after_the_resync() -> None:
    """Its logits belong to a step that was dropped; nobody may draw from them."""
    async with running(HookedModel({2: burst})) as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[], held=[2]))
        executor.launch(builder.batch({3: PROMPT}, sampling=[3]))
        executor.resync(Resync(3))
        outcome = await executor.sample(Sample(1, np.array([2], np.int32).tobytes(), b"\xff" * 8))
    assert isinstance(outcome, StepFailed)
    assert "rows [2] are sampled, but not held" in outcome.error.message


async def test_a_mask_that_allows_nothing_fails_its_sample() -> None:
    async with running() as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[], held=[2]))
        outcome = await executor.sample(Sample(1, np.array([2], np.int32).tobytes(), bytes(8)))
    assert isinstance(outcome, StepFailed)
    assert "row 2: no token can be drawn" in outcome.error.message


async def test_a_dying_executor_thread_completes_died() -> None:
    """What is no Exception is no failing step."""

    def leave() -> NoReturn:
        raise SystemExit("the thread ends")

    async with running(HookedModel({1: leave})) as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        reason = await asyncio.wait_for(executor.died, DEADLINE_S)
    assert isinstance(reason, SystemExit)


async def test_a_thread_that_dies_while_it_warms_up_is_an_error_and_no_hang() -> None:
    def leave() -> NoReturn:
        raise SystemExit("the thread ends")

    async with running(HookedModel({1: leave})) as (executor, _):
        with pytest.raises(EngineDead, match="the device thread ended"):
            await asyncio.wait_for(executor.warm_up(), DEADLINE_S)


async def test_closing_is_no_death_and_lets_what_was_launched_land() -> None:
    async with running() as (executor, builder):
        ticket = executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        executor.close()
        assert tokens_of(await ticket) == PLAIN[:1]
        assert not executor.died.done()


# ---------------------------------------------------------------- isolation


async def test_the_loop_goes_on_during_a_long_forward() -> None:
    gate = Gate()
    async with running(HookedModel({1: gate})) as (executor, builder):
        ticket = executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        gate.wait_until_there()
        # The forward runs, and cannot end before this coroutine has gone on.
        executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        cos_sin = [await asyncio.sleep(0, rope) for rope in range(100)]
        assert len(cos_sin) == 100
        gate.open()
        assert tokens_of(await ticket) == PLAIN[:1]


async def test_a_batch_cannot_be_changed_once_it_is_made() -> None:
    async with running() as (_, builder):
        batch = builder.batch({2: PROMPT}, sampling=[2])
    with pytest.raises(AttributeError):
        batch.iteration = 7  # type: ignore[misc]  # what the test is about
    with pytest.raises(ValueError, match="read-only"):
        array_i32(batch.kv_lens)[0] = 7


# In inference mode a composite operator arrives as it was called, not as its parts.
SYNCING = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select"}


class NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in SYNCING:
            raise AssertionError(f"{func} makes the executor's thread wait for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ask", [bool, int, Tensor.item, Tensor.nonzero])
def test_the_guard_of_the_common_path_sees_every_question(
    ask: Callable[[Tensor], object],
) -> None:
    with torch.inference_mode(), NoHostSync(), pytest.raises(AssertionError, match="makes the"):
        ask(torch.ones(1, dtype=torch.int64))


@pytest.mark.slow  # the first torch dispatch mode of a process takes a moment
@pytest.mark.parametrize("graph_rows", [0, 4])
async def test_no_step_of_the_common_path_asks_the_device_for_a_value(
    graph_rows: int,
) -> None:
    """Prefill, chunk, mixed and decode; greedy, temperature, penalties, bias and logprobs."""
    inits = [
        greedy(1),
        greedy(2, temperature=0.7, seed=4),
        greedy(3, presence_penalty=0.5, logit_bias=((3, 1.0),), num_logprobs=2),
    ]
    guard = NoHostSync()
    model = HookedModel({1: guard.__enter__})
    async with running(model, device=GraphDevice(), graph_rows=graph_rows) as (executor, builder):
        tickets = [executor.launch(builder.batch({1: [5]}, sampling=[1], inits=inits[:1]))]
        query_lens = {1: [-1], 2: PROMPT, 3: PROMPT[:4]}
        tickets.append(executor.launch(builder.batch(query_lens, sampling=[1, 2], inits=inits[1:])))
        tickets.append(executor.launch(builder.batch({2: [-2], 3: PROMPT}, sampling=[2, 3])))
        query_lens = {row: [-row] for row in (1, 2, 3)}
        tickets += [
            executor.launch(builder.batch(query_lens, sampling=[1, 2, 3])) for _ in range(3)
        ]
        outcomes = [await ticket for ticket in tickets]
    assert [type(outcome) for outcome in outcomes] == [StepResult] * 6


# ---------------------------------------------------------------- lifetimes


class SeesRunner(Autoregressive):
    """Shows the runner that it was given."""

    runner: StepRunner

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        self.runner = runner
        return super().step(runner, step, publish)


async def test_buffers_are_reused_only_after_their_steps_event() -> None:
    """Six steps are through before the first of their events is done."""
    device, gate = LateDevice(), Gate()
    async with running(HookedModel({7: gate}), device=device) as (executor, builder):
        tickets = [executor.launch(builder.batch({2: PROMPT}, sampling=[2]))]
        tickets += [executor.launch(builder.batch({2: [-2]}, sampling=[2])) for _ in range(6)]
        gate.wait_until_there()
        gate.open()
        device.is_done.set()
        outputs = [tokens_of(await ticket) for ticket in tickets]
        assert not executor.died.done()
    assert [token for tokens in outputs for token in tokens] == PLAIN[:7]


async def test_buffers_are_reused_after_their_steps_event() -> None:
    device = LateDevice()
    device.is_done.set()
    made: list[int] = []
    make_buffer = device.host_buffer

    def count(num_words: int) -> Tensor:
        made.append(num_words)
        return make_buffer(num_words)

    device.host_buffer = count  # type: ignore[method-assign]  # counts what the executor asks for
    async with running(device=device) as (executor, builder):
        await executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        for _ in range(5):
            await executor.launch(builder.batch({2: [-2]}, sampling=[2]))
    assert len(made) == 2  # one on the way in, one on the way out


async def test_what_a_step_staged_and_packed_is_gone_when_a_later_one_is_through() -> None:
    device = LateDevice()
    device.is_done.set()
    async with running(device=device) as (executor, builder):
        await executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        await executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        await executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        gc.collect()
        assert [ref() for ref in device.staged[:2] + device.packed[:2]] == [None] * 4


async def test_a_row_gets_a_new_tenant_while_a_step_of_the_former_one_still_runs() -> None:
    """Trap 9: its page table and parameters are rewritten behind that step, not under it."""
    gate = Gate()
    async with running(HookedModel({2: gate})) as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        former = executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        gate.wait_until_there()
        tenant = builder.batch({2: [8, 8, 8]}, sampling=[2], inits=[greedy(2)])
        late = executor.launch(tenant)
        gate.open()
        assert tokens_of(await former) == PLAIN[1:2]
        assert tokens_of(await late) == plain_outputs(HashModel(), request("t", [8, 8, 8]))[:1]


async def test_warm_up_touches_no_requests_state() -> None:
    mode = SeesRunner()
    async with running(mode=mode) as (executor, builder):
        await executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        state = mode.runner.state
        stamps, before = state.relay.written_iter.clone(), _copies(state.pools)
        await executor.warm_up()
        assert all(map(torch.equal, _copies(state.pools), before))
        assert torch.equal(state.relay.written_iter, stamps)
        assert (
            tokens_of(await executor.launch(builder.batch({2: [-2]}, sampling=[2]))) == PLAIN[1:2]
        )


def _copies(pools: KvPools) -> list[Tensor]:
    """All but page 0."""
    kv = [tensor for layer in pools.layers.values() for tensor in (layer.keys, layer.values)]
    slots = [tensor[pools.page_size :].clone() for tensor in (*kv, pools.token_pool)]
    return [*slots, *(table.clone() for table in pools.page_tables)]
