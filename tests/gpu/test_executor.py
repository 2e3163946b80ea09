"""The executor thread: results in order, failing steps as values, and a loop that never waits."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import Tensor

from aserve.errors import EngineDead
from aserve.gpu.device.base import Device
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.base import CausalModel
from aserve.gpu.step.ticket import StepTicket
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.results import StepFailed, StepResult
from aserve.messages.step import Resync, Sample
from tests.fakes.gated_model import Gate, HookedModel
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.late_device import LateDevice
from tests.gpu.batch_builder import BatchBuilder, greedy, running, tokens_of
from tests.gpu.drive import make_executor, request
from tests.gpu.plain_engine import plain_outputs

DEADLINE_S = 30.0
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
PLAIN = plain_outputs(HashModel(), request("plain", PROMPT))


@asynccontextmanager
async def started(
    model: CausalModel | None = None, device: Device | None = None
) -> AsyncIterator[tuple[TorchExecutor, BatchBuilder]]:
    executor = make_executor(model or HashModel(), device=device)
    async with running(executor) as builder:
        yield executor, builder


def sample_row_2(mask: bytes = b"\xff" * 8) -> Sample:
    """Of the first step."""
    return Sample(1, pack_i32([2]), mask)


async def assert_fails(ticket: StepTicket, *, says: str) -> None:
    outcome = await ticket
    assert isinstance(outcome, StepFailed)
    assert says in outcome.error.message


# ---------------------------------------------------------------- results


async def test_steps_complete_in_launch_order_with_the_plain_engines_tokens() -> None:
    """Eight steps are launched before the first result: the relay alone carries the tokens."""
    gate = Gate()
    finished: list[int] = []
    async with started(HookedModel({1: gate})) as (executor, builder):
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


async def test_lengths_come_with_every_step() -> None:
    async with started() as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        lens = await executor.launch(builder.batch({2: [-2], 3: [1, 2]}, sampling=[2])).seq_lens
    assert array_i32(lens.rows).tolist() == [2, 3]
    assert array_i32(lens.lens).tolist() == [len(PROMPT) + 1, 2]


async def test_a_held_row_is_sampled_later_under_its_mask_and_its_neighbour_at_once() -> None:
    """The held row's logits outlive the next step, which its neighbour runs meanwhile."""
    allowed = sorted(set(range(VOCAB)) - {PLAIN[0]})
    mask = sum(1 << token for token in allowed).to_bytes(8, "little")
    async with started() as (executor, builder):
        first = executor.launch(builder.batch({1: PROMPT, 2: PROMPT}, sampling=[1], held=[2]))
        second = executor.launch(builder.batch({1: [-1]}, sampling=[1]))
        held = executor.sample(sample_row_2(mask))
        third = executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        outcome = await first
        assert isinstance(outcome, StepResult)
        assert array_i32(outcome.rows).tolist() == [1]
        assert tokens_of(outcome) + tokens_of(await second) == PLAIN[:2]
        sampled = tokens_of(await held)
        assert sampled[0] in allowed
        follows = request("follows", [*PROMPT, *sampled])
        assert tokens_of(await third) == plain_outputs(HashModel(), follows)[:1]


class HeldLogits:
    """Whether the logits of the first step are still in memory."""

    def __init__(self) -> None:
        self.model = HookedModel(spoil={1: self._note})

    def _note(self, logits: Tensor) -> Tensor:
        self._noted = weakref.ref(logits)
        return logits

    @property
    def are_kept(self) -> bool:
        gc.collect()
        return self._noted() is not None


async def test_what_a_row_held_is_freed_when_a_step_names_the_row_again() -> None:
    """The request was cancelled while its row was held, so nobody samples it."""
    first = HeldLogits()
    async with started(first.model) as (executor, builder):
        await executor.launch(builder.batch({2: PROMPT}, sampling=[], held=[2]))
        await executor.launch(builder.batch({3: PROMPT}, sampling=[3]))
        assert first.are_kept
        again = builder.batch({2: PROMPT}, sampling=[2], inits=[greedy(2)])
        assert tokens_of(await executor.launch(again)) == PLAIN[:1]
        assert not first.are_kept
        await assert_fails(executor.sample(sample_row_2()), says=NOT_HELD)


async def test_a_row_that_waits_long_does_not_keep_the_logits_of_the_others() -> None:
    """Of four held rows two are sampled, one by one: those that are left are copied, and are
    sampled at last."""
    first, prompts = HeldLogits(), {row: PROMPT[row:] for row in range(1, 5)}
    async with started(first.model) as (executor, builder):
        executor.launch(builder.batch(prompts, sampling=[], held=[*prompts]))
        sampled: dict[int, int] = {}
        for row, kept_after in ((1, True), (3, False), (4, False), (2, False)):
            outcome = await executor.sample(Sample(1, pack_i32([row]), b"\xff" * 8))
            [sampled[row]] = tokens_of(outcome)
            await executor.launch(builder.batch({5: [7]}, sampling=[]))  # the Sample is over
            assert first.are_kept is kept_after
    plain = {row: request(str(row), prompt) for row, prompt in prompts.items()}
    assert sampled == {row: plain_outputs(HashModel(), each)[0] for row, each in plain.items()}


# ---------------------------------------------------------------- failures


def burst() -> NoReturn:
    raise ArithmeticError("burst")


async def test_a_failed_step_fails_all_up_to_the_resync_and_the_next_is_good() -> None:
    """The late ones name another row, with which nothing is wrong."""
    async with started(HookedModel({3: burst})) as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        executor.launch(builder.batch({3: PROMPT}, sampling=[], held=[3]))
        failed = executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        sample = executor.sample(Sample(2, pack_i32([3]), b"\xff" * 8))
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


def with_a_nan(logits: Tensor) -> Tensor:
    logits[1, 5] = torch.nan
    return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_nan_logits_fail_their_step_and_name_the_row(temperature: float) -> None:
    inits = [greedy(row, temperature=temperature) for row in (1, 4)]
    async with started(HookedModel(spoil={1: with_a_nan})) as (executor, builder):
        ticket = executor.launch(
            builder.batch({1: PROMPT, 4: PROMPT}, sampling=[1, 4], inits=inits)
        )
        await assert_fails(ticket, says="row 4: no token can be drawn")
        later = executor.launch(builder.batch({1: [-1]}, sampling=[1]))
        await assert_fails(later, says="an earlier step failed")
        executor.resync(Resync(3))
        good = builder.batch({1: PROMPT}, sampling=[1], inits=[greedy(1)])
        assert tokens_of(await executor.launch(good)) == PLAIN[:1]


NOT_HELD = "rows [2] are sampled, but not held"


async def test_a_held_row_cannot_be_sampled_twice() -> None:
    async with started() as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[], held=[2]))
        first, second = (executor.sample(sample_row_2()) for _ in range(2))
        assert tokens_of(await first) == PLAIN[:1]
        await assert_fails(second, says=NOT_HELD)


async def test_a_row_that_was_held_before_a_failure_cannot_be_sampled_after_the_resync() -> None:
    """Its logits belong to a step that was dropped; nobody may draw from them."""
    async with started(HookedModel({2: burst})) as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[], held=[2]))
        executor.launch(builder.batch({3: PROMPT}, sampling=[3]))
        executor.resync(Resync(3))
        await assert_fails(executor.sample(sample_row_2()), says=NOT_HELD)


async def test_a_mask_that_allows_nothing_fails_its_sample() -> None:
    async with started() as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[], held=[2]))
        ticket = executor.sample(sample_row_2(bytes(8)))
        await assert_fails(ticket, says="row 2: no token can be drawn")


@pytest.mark.parametrize("told", [1, 3])
async def test_an_exact_length_that_is_not_the_devices_own_fails_its_step(told: int) -> None:
    async with started() as (executor, builder):
        executor.launch(builder.batch({2: [5, 6]}, sampling=[2]))
        step = builder.batch({2: [-2]}, sampling=[2])
        ticket = executor.launch(msgspec.structs.replace(step, kv_lens=pack_i32([told])))
        says = f"row 2 has 2 KV positions on the device; the host says exactly {told}"
        await assert_fails(ticket, says=says)


def leave() -> NoReturn:
    """What is no Exception is no failing step."""
    raise SystemExit("the thread ends")


async def test_a_dying_executor_thread_completes_died() -> None:
    async with started(HookedModel({1: leave})) as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        reason = await asyncio.wait_for(executor.died, DEADLINE_S)
    assert isinstance(reason, SystemExit)


async def test_a_thread_that_dies_while_it_warms_up_is_an_error_and_no_hang() -> None:
    async with started(HookedModel({1: leave})) as (executor, _):
        with pytest.raises(EngineDead, match="the device thread ended"):
            await asyncio.wait_for(executor.warm_up(), DEADLINE_S)


async def test_closing_is_no_death_and_lets_what_was_launched_land() -> None:
    async with started() as (executor, builder):
        ticket = executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        executor.close()
        assert tokens_of(await ticket) == PLAIN[:1]
        assert not executor.died.done()


# ---------------------------------------------------------------- lifetimes


async def test_buffers_are_reused_after_their_steps_event() -> None:
    device = LateDevice()
    device.is_done.set()
    make_buffer = Mock(wraps=device.host_buffer)
    device.host_buffer = make_buffer  # type: ignore[method-assign]  # counts what is asked for
    async with started(device=device) as (executor, builder):
        await executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        for _ in range(5):
            await executor.launch(builder.batch({2: [-2]}, sampling=[2]))
    assert make_buffer.call_count == 2  # one on the way in, one on the way out


async def test_what_a_step_staged_and_packed_is_gone_when_a_later_one_is_through() -> None:
    device = LateDevice()
    device.is_done.set()
    async with started(device=device) as (executor, builder):
        await executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        await executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        await executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        gc.collect()
        assert [ref() for ref in device.staged[:2] + device.packed[:2]] == [None] * 4


async def test_a_row_gets_a_new_tenant_while_a_step_of_the_former_one_still_runs() -> None:
    """Trap 9: its page table and parameters are rewritten behind that step, not under it."""
    gate = Gate()
    async with started(HookedModel({2: gate})) as (executor, builder):
        executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        former = executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        gate.wait_until_there()
        tenant = builder.batch({2: [8, 8, 8]}, sampling=[2], inits=[greedy(2)])
        late = executor.launch(tenant)
        gate.open()
        assert tokens_of(await former) == PLAIN[1:2]
        assert tokens_of(await late) == plain_outputs(HashModel(), request("t", [8, 8, 8]))[:1]


async def test_warm_up_touches_no_requests_state() -> None:
    async with started() as (executor, builder):
        await executor.launch(builder.batch({2: PROMPT}, sampling=[2]))
        state = executor._runner.state
        stamps, before = state.relay.written_iter.clone(), _copies(state.pools)
        await executor.warm_up()
        assert all(map(torch.equal, _copies(state.pools), before))
        assert torch.equal(state.relay.written_iter, stamps)
        next_step = executor.launch(builder.batch({2: [-2]}, sampling=[2]))
        assert tokens_of(await next_step) == PLAIN[1:2]


def _copies(pools: KvPools) -> list[Tensor]:
    """All but page 0."""
    kv = [tensor for layer in pools.layers.values() for tensor in (layer.keys, layer.values)]
    slots = [tensor[pools.page_size :].clone() for tensor in (*kv, pools.token_pool)]
    return [*slots, *(table.clone() for table in pools.page_tables)]
