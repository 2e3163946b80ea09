"""What the CPU's pools take of memory before anybody uses them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from aserve.gpu.device.cpu.device import CpuDevice

MIB = 1 << 20


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_is_zero_and_not_resident_before_it_is_written(dtype: torch.dtype) -> None:
    before = resident_bytes()
    pool = CpuDevice().zeros((2, 64 * MIB), dtype)
    assert resident_bytes() - before < 8 * MIB
    pool[1, :4] = 1
    assert (pool.dtype, pool[:, :8].sum().item()) == (dtype, 4)
