"""FlashInfer's workspace, which is far too large for tests over its fake."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name: Triton's kernels must not be imported before its interpreter is chosen."""
    monkeypatch.setattr("aserve.gpu.attention.flashinfer.wrappers.FLOAT_BYTES", 16)
