"""Kernels round in the interpreter as they do on the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _exact_rounding() -> Iterator[None]:
    from triton.runtime import interpreter  # not before TRITON_INTERPRET is set

    from tests.kernels.rounding import convert

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield
