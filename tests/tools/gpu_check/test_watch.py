"""What a watched device tells of steps, and that it is the same device otherwise."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.base import GraphBreak
from tools.gpu_check import watch as watching
from tools.gpu_check.recorded_graphs import RecordingCpu
from tools.gpu_check.watch import watched

WORDS = torch.arange(4, dtype=torch.int32)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a millisecond later."""
    moments = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(moments) / 1e3)
    monkeypatch.setattr(watching, "time", clock)


def test_a_gap_is_from_the_last_result_of_a_step_to_the_values_of_the_next(clock: None) -> None:
    device, watch = watched(RecordingCpu())
    host = device.host_buffer(4)
    device.stage(WORDS)  # begins at 0 ms
    device.copy_out(WORDS, host)  # lengths, published early: 1 ms
    device.copy_out(WORDS, host)  # ends at 2 ms
    device.stage(WORDS)  # 3 ms
    device.stage(WORDS)  # the same step: no look at the clock
    device.copy_out(WORDS, host)
    assert list(watch.gaps_us()) == pytest.approx([1000])
    watch.clear()
    assert list(watch.gaps_us()) == []


def test_the_captured_step_that_ran_last_can_be_replayed_alone() -> None:
    device, watch = watched(RecordingCpu())
    total = torch.zeros(1)

    def add(number: float, _graph_break: GraphBreak) -> Tensor:
        return total.add_(number)

    ones, tens = (device.capture(partial(add, number)) for number in (1.0, 10.0))
    assert watch.last is None
    ones.replay(lambda _: None)
    tens.replay(lambda _: None)
    last = watch.last
    assert last is not None
    assert watch.num_replays == 2
    before = float(total)
    last.replay(lambda _: None)
    assert float(total) == before + 10


def test_a_watched_device_is_the_same_device_otherwise() -> None:
    cpu = RecordingCpu()
    device, _ = watched(cpu)
    assert device.about == cpu.about
    assert device.attention == cpu.attention
    host = device.host_buffer(4)
    device.copy_out(device.stage(WORDS), host).synchronize()
    assert host.tolist() == WORDS.tolist()
