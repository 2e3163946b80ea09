"""Copies between host and device: the host never waits for them (trap 8)."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.base import Event
from aserve.gpu.models.attend import Attend
from aserve.gpu.models.hidden_capture import HiddenCapture
from aserve.messages import StepResult, array_i32
from tests.gpu.batch_builder import BatchBuilder
from tests.gpu.cuda.places import CudaPlace, Place
from tests.gpu.drive import request
from tests.gpu.gated_model import TIMEOUT_S
from tests.gpu.hash_model import HashModel
from tests.gpu.plain_engine import plain_outputs

NUM_WORDS = 1 << 22  # more than a driver stages by itself
SLEEP_CYCLES = 1 << 30  # half a second or more
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
NUM_STEPS = 4


def is_done(event: Event) -> bool:
    assert isinstance(event, torch.cuda.Event)
    return bool(event.query())


def test_what_is_copied_in_and_out_comes_back_the_same(place: Place) -> None:
    device = place.device
    there, back = device.host_buffer(1000), device.host_buffer(1000)
    values = torch.arange(1000, dtype=torch.int32)
    there.copy_(values)
    with torch.inference_mode(), device.stream():
        event = device.copy_out(device.stage(there), back)
    event.synchronize()
    assert torch.equal(back, values)


@pytest.mark.gpu
def test_buffers_of_the_host_are_pinned() -> None:
    assert CudaPlace().device.host_buffer(8).is_pinned()


@pytest.mark.gpu
def test_copies_both_ways_return_while_the_device_is_still_busy() -> None:
    device = CudaPlace().device
    there, back = device.host_buffer(NUM_WORDS), device.host_buffer(NUM_WORDS)
    with torch.inference_mode(), device.stream():
        torch.cuda._sleep(SLEEP_CYCLES)
        busy = device.mark()
        event = device.copy_out(device.stage(there), back)
        assert not is_done(busy)
    event.synchronize()
    assert is_done(busy)


@pytest.mark.gpu
def test_a_copy_from_pageable_memory_would_have_waited() -> None:
    """The test above can see it."""
    device = CudaPlace().device
    with torch.inference_mode(), device.stream():
        torch.cuda._sleep(SLEEP_CYCLES)
        busy = device.mark()
        device.stage(torch.zeros(NUM_WORDS, dtype=torch.int32))
        assert is_done(busy)


class Slow(HashModel):
    """Each forward keeps the device busy for a while, and the host not at all."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().forward(input_ids, positions, attend, capture=capture)


async def test_steps_are_asked_for_while_the_first_one_runs(place: Place) -> None:
    loop = asyncio.get_running_loop()
    executor = place.executor(lambda where: Slow(device=where))
    executor.start(loop)
    try:
        builder = BatchBuilder(executor.spec)
        batches = [builder.batch({2: PROMPT}, sampling=[2])]
        batches += [builder.batch({2: [-2]}, sampling=[2]) for _ in range(NUM_STEPS - 1)]
        tickets = [executor.launch(batch) for batch in batches]
        are_asked: asyncio.Future[bool] = loop.create_future()

        def say_so() -> None:
            loop.call_soon_threadsafe(are_asked.set_result, tickets[0].outcome.done())

        executor._inbox.put(say_so)
        async with asyncio.timeout(TIMEOUT_S):
            has_first = await are_asked
            outcomes = [await ticket for ticket in tickets]
    finally:
        executor.close()
    assert not (has_first and isinstance(place, CudaPlace))
    results = [outcome for outcome in outcomes if isinstance(outcome, StepResult)]
    tokens = [int(token) for result in results for token in array_i32(result.tokens)]
    assert tokens == plain_outputs(HashModel(), request("plain", PROMPT))[:NUM_STEPS]
