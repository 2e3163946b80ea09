"""Each device replaces some operators by its own; the others stay the torch reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aserve.gpu.device.base import Device
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.ops import TORCH_OPS
from tests.fakes.cuda import FakeCuda

KERNELS = {"elementwise", "rope_and_store_kv", "sample_ops", "lora_ops"}
HALVES_AND_FLOAT32 = [torch.float32, torch.bfloat16, torch.float16]
TRITON = KERNELS | {"row_ops", "resolve"}


def own(device: Device, dtype: torch.dtype, *, is_deterministic: bool) -> set[str]:
    """The names of the operators that are not torch's."""
    ops = device.ops(dtype, is_deterministic=is_deterministic)
    names = [field.name for field in dataclasses.fields(ops)]
    return {name for name in names if getattr(ops, name) is not getattr(TORCH_OPS, name)}


@pytest.mark.parametrize(
    ("device", "dtypes", "is_deterministic", "names"),
    [
        (CpuDevice(), [torch.float32, torch.bfloat16], False, KERNELS | {"fused_step"}),
        (CpuDevice(), [torch.float64, torch.float16], False, set()),
        # The other kernels of the CPU do not keep a token's bits.
        (CpuDevice(), [torch.float32, torch.bfloat16], True, {"elementwise", "lora_ops"}),
        (CudaDevice(FakeCuda()), HALVES_AND_FLOAT32, False, TRITON),
        (CudaDevice(FakeCuda()), HALVES_AND_FLOAT32, True, TRITON),
    ],
)
def test_a_device_has_kernels_for_its_dtypes(
    device: Device, dtypes: list[torch.dtype], is_deterministic: bool, names: set[str]
) -> None:
    for dtype in dtypes:
        assert own(device, dtype, is_deterministic=is_deterministic) == names
