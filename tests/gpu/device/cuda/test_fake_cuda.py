"""The CUDA runtime without a GPU: when work runs, and what it finds wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.cuda.device import CudaDevice
from tests.fakes.cuda import META, FakeCuda, Hazard


def test_work_runs_when_somebody_waits_for_it_and_in_the_order_of_its_stream() -> None:
    cuda = FakeCuda()
    stream, event = cuda.new_stream(), cuda.new_event()
    host = cuda.pinned(4)
    with cuda.on(stream):
        values = torch.arange(4, dtype=torch.int32, device=META).mul_(3)
        host.copy_(values, non_blocking=True)
        stream.record_event(event)
        values.add_(1)
    assert stream.num_done == 0
    event.synchronize()
    assert host.tolist() == [0, 3, 6, 9]
    assert cuda.read(values).tolist() == [1, 4, 7, 10]


def test_a_view_writes_into_what_it_is_a_view_of() -> None:
    cuda = FakeCuda()
    with cuda.on(cuda.new_stream()):
        table = torch.zeros((2, 3), device=META)
        table[1].copy_(torch.arange(3.0, device=META))
        table[:, :1].fill_(7)
    assert cuda.read(table).tolist() == [[7, 0, 0], [7, 1, 2]]


def test_what_nobody_has_written_is_garbage() -> None:
    cuda = FakeCuda()
    with cuda.on(cuda.new_stream()):
        empty = torch.empty(2, dtype=torch.int32, device=META)
    assert cuda.read(empty).tolist() == [0x7B7B7B7B] * 2


def two_streams(cuda: FakeCuda, use: Callable[[Tensor], object], *, waits: bool) -> None:
    """Writes a tensor on one stream, and uses it on another."""
    first, second = cuda.new_stream(), cuda.new_stream()
    with cuda.on(first):
        values = torch.zeros(2, device=META)
    if waits:
        second.wait_stream(first)
    with cuda.on(second):
        use(values)
    cuda.keep(values, second)


@pytest.mark.parametrize("use", [lambda x: x + 1, lambda x: x.add_(1)])
def test_streams_that_share_a_tensor_must_be_ordered(use: Callable[[Tensor], object]) -> None:
    two_streams(FakeCuda(), use, waits=True)
    with pytest.raises(Hazard, match="on stream 2 races the write of what aten"):
        two_streams(FakeCuda(), use, waits=False)


def test_a_write_must_be_ordered_behind_the_reads_of_others() -> None:
    cuda = FakeCuda()
    first, second = cuda.new_stream(), cuda.new_stream()
    with cuda.on(first):
        values = torch.zeros(2, device=META)
    second.wait_stream(first)
    with cuda.on(second):
        values + 1
    with cuda.on(first), pytest.raises(Hazard, match="on stream 1 races a read of"):
        values.add_(1)


def graph_of(device: CudaDevice, body: Callable[[], Tensor]) -> Callable[[], Tensor]:
    captured = device.capture(lambda _cut: body())
    return lambda: captured.replay(lambda _values: None)


def test_a_graph_reads_the_devices_values_of_now_and_the_hosts_of_the_capture() -> None:
    cuda = FakeCuda()
    device = CudaDevice(cuda)
    with device.stream():
        words, table = torch.zeros(3, device=META), torch.zeros(3, device=META)
        factors = [2.0]
        replay = graph_of(device, lambda: table.add_(words * factors[0]) * 10)
        words.fill_(1)
        factors[0] = 3.0
        result = replay()
        assert cuda.read(result).tolist() == [20.0] * 3
        replay()
    assert cuda.read(result).tolist() == [40.0] * 3
    cuda.assert_sound()


def test_a_result_that_is_not_copied_before_the_next_replay_is_a_race() -> None:
    """Trap 7."""
    cuda = FakeCuda()
    device = CudaDevice(cuda)
    host = device.host_buffer(2)
    with device.stream():
        words = torch.zeros(2, dtype=torch.int32, device=META)
        replay = graph_of(device, lambda: words + 1)
        device.copy_out(replay().clone(), host)
        replay()
        device.copy_out(replay(), device.host_buffer(2))
        with pytest.raises(Hazard, match="races a read of"):
            replay()


@pytest.mark.parametrize(
    ("captured", "what"),
    [
        (lambda device: device.stage(device.host_buffer(2)), "a copy from or to the host"),
        (lambda device: device.mark(), "not permitted when stream is capturing"),
    ],
)
def test_what_may_not_be_captured_is_refused(
    captured: Callable[[CudaDevice], object], what: str
) -> None:
    cuda = FakeCuda()
    device = CudaDevice(cuda)
    runs: list[int] = []

    def body() -> Tensor:
        runs.append(len(runs))
        if len(runs) == 2:  # the first is no capture
            captured(device)
        return torch.zeros(1, device=META)

    with device.stream():
        with pytest.raises((RuntimeError, Hazard), match=what):
            graph_of(device, body)
        torch.zeros(1, device=META)
        device.mark()
