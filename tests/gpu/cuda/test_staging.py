"""Copies between host and device: the host never waits for them (trap 8)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.base import Device, Event
from aserve.gpu.models.base import Attend
from tests.fakes.hash_model import HashModel
from tests.gpu.batch_builder import running, tokens_of
from tests.gpu.cuda.places import CudaPlace, Place
from tests.gpu.device.cuda.test_device import all_is_asked
from tests.gpu.drive import request
from tests.gpu.plain_engine import plain_outputs

NUM_WORDS = 1 << 22  # more than a driver stages by itself
SLEEP_CYCLES = 1 << 30  # half a second or more
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
NUM_STEPS = 4


def is_done(event: Event) -> bool:
    assert isinstance(event, torch.cuda.Event)
    return bool(event.query())


def copy_both_ways(device: Device, there: Tensor, back: Tensor) -> Event:
    """Behind a while in which the device is busy. Done once before, so that neither memory nor a
    kernel has to be brought there meanwhile.
    """
    device.copy_out(device.stage(there), back).synchronize()
    torch.cuda._sleep(1)
    torch.cuda._sleep(SLEEP_CYCLES)
    busy = device.mark()
    device.copy_out(device.stage(there), back)
    return busy


@pytest.mark.gpu
def test_copies_both_ways_return_while_the_device_is_still_busy() -> None:
    device = CudaPlace().device
    there, back = device.host_buffer(NUM_WORDS), device.host_buffer(NUM_WORDS)
    with torch.inference_mode(), device.stream():
        assert not is_done(copy_both_ways(device, there, back))


class Slow(HashModel):
    """Each forward keeps the device busy for a while, and the host not at all."""

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().hidden(input_ids, positions, attend)


async def test_steps_are_asked_for_while_the_first_one_runs(place: Place) -> None:
    """In the second row: the first one brings memory and kernels to the device."""
    executor = place.executor(lambda where: Slow(device=where), graph_rows=0)
    expected = plain_outputs(HashModel(), request("plain", PROMPT))[:NUM_STEPS]
    async with running(executor) as builder:
        for row in (2, 3):
            batches = [builder.batch({row: PROMPT}, sampling=[row])]
            batches += [builder.batch({row: [-row]}, sampling=[row]) for _ in range(NUM_STEPS - 1)]
            tickets = [executor.launch(batch) for batch in batches]
            await all_is_asked(executor)
            has_first = tickets[0].outcome.done()
            tokens = [token for ticket in tickets for token in tokens_of(await ticket)]
            assert tokens == expected
    assert not (has_first and isinstance(place, CudaPlace))
