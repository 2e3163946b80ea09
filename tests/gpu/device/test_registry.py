"""The choice of a device, its stated reason, and a device that is registered from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from unittest.mock import Mock

import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.device.base import Device
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cuda.device import CudaDevice, why_no_cuda
from aserve.gpu.device.ops import TORCH_OPS, DeviceOps
from aserve.gpu.device.registry import DEVICES, OpenDevice, open_device
from aserve.gpu.layers.linear import prepare
from aserve.gpu.layers.norm import RmsNorm
from aserve.gpu.layers.ops import Elementwise
from aserve.gpu.weights.format import WeightFormat, WeightRequest
from aserve.tiny import MODEL_DIR
from tests.fakes.cuda import FakeCuda
from tests.gpu.batch_builder import running, tokens_by_row

HAS_CUDA = torch.cuda.is_available()


def test_auto_takes_cuda_where_it_is_and_says_why_else() -> None:
    device = open_device("auto")
    assert device.torch_device.type == ("cuda" if HAS_CUDA else "cpu")
    assert "auto" in device.about
    assert HAS_CUDA or why_no_cuda() in device.about
    assert open_device("cpu").about == "cpu"


def test_cuda_where_there_is_none_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no CUDA: torch .*; take --device cpu or auto"):
        open_device("cuda")


class StandIn(CpuDevice):
    """A device that no file of aserve names. It has a fused step that takes no step."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.about = f"a stand-in ({why})"
        self.prepare = Mock(wraps=prepare)
        self.norm = Mock(wraps=RmsNorm)
        self.fused_step = Mock(can_run=Mock(return_value=False), can_step=Mock(return_value=False))

    def weight_format(self, request: WeightRequest) -> WeightFormat:
        return WeightFormat(torch.float64, self.prepare, "the format of the stand-in")

    def ops(self, dtype: torch.dtype, *, is_deterministic: bool) -> DeviceOps:
        elementwise = Elementwise(norm=self.norm)
        return DeviceOps(elementwise=elementwise, fused_step=lambda *_given: self.fused_step)


async def tokens_on(device: str, devices: Mapping[str, OpenDevice]) -> list[dict[int, int]]:
    options = BuildOptions(MODEL_DIR, device=device, num_pages=16, max_rows=2)
    executor = build_executor(options, devices=devices)
    assert ("the format of the stand-in on a stand-in" in executor.about) == (device != "cpu")
    steps = [[5, 6, 7], [-1], [-1]]
    async with running(executor) as run:
        return [tokens_by_row(await run.launch({1: ids}, sampling=[1])) for ids in steps]


async def test_a_device_is_registered_from_outside_by_one_row() -> None:
    opened: list[StandIn] = []

    def open_stand_in(why: str) -> StandIn:
        opened.append(StandIn(why))
        return opened[-1]

    devices = {"stand-in": open_stand_in, **DEVICES}
    assert await tokens_on("stand-in", devices) == await tokens_on("cpu", devices)
    fused = opened[0].fused_step
    for asked in (opened[0].prepare, opened[0].norm, fused.can_run, fused.can_step):
        assert asked.called
    assert open_device("auto", devices).about == "a stand-in (auto)"
    with pytest.raises(ConfigError, match="supported: auto, cpu, cuda, mlx, stand-in"):
        open_device("tpu", devices)


KERNELS = {"elementwise", "rope_and_store_kv", "sample_ops", "lora_ops", "make_advance_rows"}
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
        (
            CpuDevice(),
            [torch.float32, torch.bfloat16],
            False,
            KERNELS | {"fused_draft", "fused_step", "suffix_match"},
        ),
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
