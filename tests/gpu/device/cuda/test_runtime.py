"""What torch.cuda is taken to do, where there is CUDA: the simulated runtime does the same."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.cuda.runtime import TorchCuda, pinned_zeros
from aserve.gpu.transfer.pinned import to_device
from aserve_kernels.copy_rows import copy_rows

pytestmark = pytest.mark.gpu

TIMEOUT_S = 60.0
LONG_CYCLES = 1 << 30  # about half a second
MIB = 1 << 20


@pytest.fixture
def cuda() -> TorchCuda:
    return TorchCuda()


def test_a_wait_for_an_event_leaves_the_interpreter_to_others(cuda: TorchCuda) -> None:
    device = CudaDevice(cuda)
    with device.stream():
        torch.cuda._sleep(LONG_CYCLES)
        event = device.mark()
    waits = threading.Thread(target=event.synchronize)
    waits.start()
    num_rounds = 0
    while waits.is_alive():
        num_rounds += 1
    waits.join(TIMEOUT_S)
    assert num_rounds > 10_000


def test_growth_is_what_a_run_takes_at_most_and_memory_is_free_again_after_it(
    cuda: TorchCuda,
) -> None:
    def run() -> None:
        first = torch.empty(64 * MIB, dtype=torch.uint8, device=cuda.torch_device)
        del first
        torch.empty(32 * MIB, dtype=torch.uint8, device=cuda.torch_device)

    def keep() -> None:
        run()
        kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device=cuda.torch_device))

    kept: list[Tensor] = []
    before = cuda.memory()
    assert 64 * MIB <= cuda.growth(run) < 128 * MIB
    after = cuda.memory()
    assert after.total == before.total
    assert after.free >= before.free - MIB
    assert cuda.growth(keep) < 64 * MIB  # what stays is part of the memory in use
    assert cuda.memory().free < before.free - 32 * MIB


def test_what_the_host_copies_to_the_device_waits_for_no_other_work(cuda: TorchCuda) -> None:
    with CudaDevice(cuda).stream():
        torch.cuda._sleep(LONG_CYCLES)
        event = torch.cuda.Event()
        event.record()
        copied = to_device(np.arange(5), cuda.torch_device)
        assert not event.query()
    cuda.synchronize()
    assert copied.tolist() == [0, 1, 2, 3, 4]


def test_the_device_reads_pinned_zeros(cuda: TorchCuda) -> None:
    zeros, rows = pinned_zeros((3, 1000), torch.bfloat16), torch.arange(3).to(cuda.torch_device)
    assert zeros.is_pinned()
    target = torch.ones((3, 1000), dtype=torch.bfloat16, device=cuda.torch_device)
    copy_rows(zeros, rows, target, rows)
    assert not target.any()


def refused_capture(device: CudaDevice, ask: Callable[[Tensor], object]) -> None:
    runs: list[int] = []
    value = torch.ones(4, device=device.torch_device)

    def body(_cut: object) -> Tensor:
        runs.append(len(runs))
        if len(runs) == 2:  # the first is no capture
            ask(value)
        return value + 1

    with pytest.raises(RuntimeError):
        device.capture(body)


def test_a_capture_that_fails_keeps_back_no_memory_of_two_streams(cuda: TorchCuda) -> None:
    device = CudaDevice(cuda)
    host = device.host_buffer(MIB)
    with device.stream():
        refused_capture(device, lambda value: value.sum().item())
        before = torch.cuda.memory_allocated(cuda.torch_device)
        for _ in range(4):
            values = torch.ones(MIB, dtype=torch.int32, device=cuda.torch_device)
            device.copy_out(values, host).synchronize()
        del values
        cuda.memory()  # lets the allocator see which events are done
        torch.empty(1, device=cuda.torch_device)
        assert torch.cuda.memory_allocated(cuda.torch_device) - before < MIB
        captured = device.capture(lambda _cut: torch.full((2,), 7, device=cuda.torch_device))
        result = captured.replay(lambda _values: None)
        device.mark().synchronize()
    assert result.tolist() == [7, 7]


RUINS_ITS_DEVICE = """
import torch
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.cuda.runtime import TorchCuda

cuda = TorchCuda()
device = CudaDevice(cuda)
with device.stream():
    outside = torch.full((1,), 1 << 30, device=cuda.torch_device)
    torch.zeros(1, device=cuda.torch_device)[outside]
    event = device.mark()
    for ask in (event.synchronize, device.mark):
        try:
            ask()
        except torch.AcceleratorError as error:
            print(str(error).splitlines()[0])
"""


def test_a_ruined_device_refuses_waits_and_marks() -> None:
    """In a process of its own, which ends with it."""
    run = subprocess.run(
        [sys.executable, "-c", RUINS_ITS_DEVICE], capture_output=True, text=True, check=False
    )
    said = [line for line in run.stdout.splitlines() if "CUDA error" in line]
    assert len(said) == 2, run.stdout + run.stderr
