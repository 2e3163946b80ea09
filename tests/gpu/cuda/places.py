"""Where a test of the engine runs, and how a model and its executor are brought there.

The model is one that is exact (hash_model.py), so that all places give the tokens of the plain
engine, which runs on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.device.cuda.device import CudaDevice, open_cuda
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.models.base import CausalModel
from tests.fakes.cuda import FakeCuda
from tests.fakes.hash_model import HashModel
from tests.gpu.drive import make_executor
from tools.gpu_check.watch import watched

MakeModel = Callable[[torch.device], CausalModel]


def hash_model(where: torch.device) -> CausalModel:
    return HashModel(device=where)


class Place:
    """`watch` counts what is replayed on the device."""

    def __init__(self, device: CudaDevice) -> None:
        self.device, self.watch = watched(device)

    def executor(
        self, make_model: MakeModel = hash_model, *, mode: DecodeMode | None = None, **options: Any
    ) -> TorchExecutor:
        model = make_model(self.device.torch_device)
        options = {"attention": "torch-ref", **options}
        return make_executor(model, mode=mode, device=self.device, **options)

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Within it, an operator that makes the host wait for the device is an error."""
        yield

    def assert_sound(self) -> None:
        """After the test: nothing was done that would be a race or a wait on a GPU."""


class CudaPlace(Place):
    def __init__(self) -> None:
        super().__init__(open_cuda("a test asks for it"))

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def assert_sound(self) -> None:
        torch.cuda.synchronize()


class FakePlace(Place):
    """It finds waits by itself, in every step."""

    def __init__(self, seed: int | None = 1) -> None:
        self.cuda = FakeCuda(seed)
        with self.cuda:
            super().__init__(CudaDevice(self.cuda))

    def executor(
        self, make_model: MakeModel = hash_model, *, mode: DecodeMode | None = None, **options: Any
    ) -> TorchExecutor:
        with self.cuda:
            return super().executor(make_model, mode=mode, **options)

    def assert_sound(self) -> None:
        self.cuda.assert_sound()
