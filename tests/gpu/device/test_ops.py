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

KERNELS = {"elementwise", "rope_and_store_kv", "sample_ops"}
COMPILED = KERNELS | {"fused_step"}
TRITON = KERNELS | {"row_ops", "resolve"}


def own(device: Device, dtype: torch.dtype, *, is_deterministic: bool = False) -> set[str]:
    """The names of the operators that are not torch's."""
    ops = device.ops(dtype, is_deterministic=is_deterministic)
    names = [field.name for field in dataclasses.fields(ops)]
    return {name for name in names if getattr(ops, name) is not getattr(TORCH_OPS, name)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_kernels_between_products(dtype: torch.dtype) -> None:
    assert own(CpuDevice(), dtype) == COMPILED


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_stay_in_torch_on_a_cpu(dtype: torch.dtype) -> None:
    assert own(CpuDevice(), dtype) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_kernel_of_a_cpu_keeps_a_tokens_bits(dtype: torch.dtype) -> None:
    assert own(CpuDevice(), dtype, is_deterministic=True) == {"elementwise"}


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_has_a_kernel_for_each(dtype: torch.dtype, is_deterministic: bool) -> None:
    device = CudaDevice(FakeCuda())
    assert own(device, dtype, is_deterministic=is_deterministic) == TRITON
