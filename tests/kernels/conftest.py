"""Kernels of Triton run in its interpreter, where they round as they do on the device, and, marked
`gpu`, on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.on_device import OnDevice

ELSEWHERE = ("cpu", "test_compiles")  # what has no kernels of Triton, or compiles them itself


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not set(metafunc.module.__name__.split(".")) & set(ELSEWHERE):
        places = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("_place", places, indirect=True)


@pytest.fixture(autouse=True)
def _place(request: pytest.FixtureRequest) -> Iterator[None]:
    where = getattr(request, "param", "cpu")
    with contextlib.nullcontext() if where == "cpu" else OnDevice(torch.device(where)):
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
    """The interpreter's products are a library's, whose sums depend on where in a tile a line is;
    those of a tensor core do not."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(
        _builder: object, a: TensorHandle, b: TensorHandle, sums: TensorHandle, *_precision: object
    ) -> TensorHandle:
        total = np.zeros_like(sums.data)
        for place in range(a.data.shape[1]):
            total += a.data[:, place, None] * b.data[place]
        return TensorHandle(sums.data + total, sums.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
