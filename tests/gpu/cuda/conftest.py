"""Tests here run on a CUDA device with a simulated runtime and, marked `gpu`, on CUDA itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.cuda.places import CudaPlace, FakePlace, Place


@pytest.fixture(params=[FakePlace, pytest.param(CudaPlace, marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = request.param()
    yield made
    made.assert_sound()
