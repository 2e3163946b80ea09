"""Kernels are launched before the one before them has ended on GPUs that can do so, and nowhere
else. That they wait for it is tested where they are compiled (compile_for_gpus.py)."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.early_launch import is_supported, launches_early


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((9, 0), None, True), ((10, 0), None, True), ((8, 9), None, False), ((9, 0), "6.4", False)],
)
def test_early_launches_need_hopper_of_nvidia(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, *, expected: bool
) -> None:
    """AMD's gfx90a says (9, 0) as well. An older GPU refuses the launch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    is_supported.cache_clear()
    assert is_supported(torch.device("cuda", 0)) == expected
    assert not launches_early(torch.zeros(1))
    is_supported.cache_clear()
