"""Runs the tests of Triton kernels in its interpreter, with the rounding of the device, and, marked
`gpu`, on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.on_device import OnDevice

NOT_TRITON = ("cpu", "test_compiles")  # CPU kernels, and the program that compiles kernels


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not set(metafunc.module.__name__.split(".")) & set(NOT_TRITON):
        devices = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("_device", devices, indirect=True)


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    name = getattr(request, "param", "cpu")
    with contextlib.nullcontext() if name == "cpu" else OnDevice(torch.device(name)):
        yield


@pytest.fixture(autouse=True, scope="session")
def _exact_rounding() -> Iterator[None]:
    from triton.runtime import interpreter  # not before TRITON_INTERPRET is set

    from tests.kernels.rounding import convert

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


@pytest.fixture
def sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums products in one order. The interpreter multiplies tiles with a library whose sums depend
    on a row's index in the tile; a tensor core's do not."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(
        _builder: object, a: TensorHandle, b: TensorHandle, sums: TensorHandle, *_precision: object
    ) -> TensorHandle:
        total = np.zeros_like(sums.data)
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None] * b.data[k]
        return TensorHandle(sums.data + total, sums.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
