"""Tests here run in three places: on the CPU, on the CUDA device with a runtime that is played,
and, marked `gpu`, on CUDA itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.cuda.places import CpuPlace, CudaPlace, PlayedPlace


@pytest.fixture(
    params=[CpuPlace, PlayedPlace, pytest.param(CudaPlace, marks=pytest.mark.gpu)],
    ids=["cpu", "played", "cuda"],
)
def place(request: pytest.FixtureRequest) -> Iterator[CpuPlace | PlayedPlace | CudaPlace]:
    made = request.param()
    yield made
    made.assert_sound()
