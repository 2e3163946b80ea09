"""Kernels of Triton run in its interpreter, where they round as they do on the device, and, marked
`gpu`, on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
