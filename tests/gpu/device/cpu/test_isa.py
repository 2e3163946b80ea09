"""What is known of the processor follows what its user allows; pools take no memory unused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aserve.gpu.device.cpu.device import CpuDevice
from tests.avx2_machine import AVX2_ONLY

# The words of one line: bfloat16, vectors, and the dtype and bits of weights of a large model.
PROGRAM = """
from aserve.gpu.device.cpu.isa import read_isa
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.weights.format import WeightRequest
isa = read_isa()
format_ = choose_cpu_format(WeightRequest("auto", "bfloat16", 1 << 30), isa)
print(isa.bf16_products, isa.has_avx512, format_.dtype, format_.stored_bits)
print(format_.about)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        (
            AVX2_ONLY,
            """None False torch.float32 16
float32 with weights stored as bfloat16 (auto: no instructions for bfloat16)
""",
        ),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "None "),  # a user caps it alone
    ],
)
def test_nothing_is_chosen_that_the_libraries_may_not_use(
    environment: dict[str, str], seen: str
) -> None:
    given = {**os.environ, "PYTHONPATH": ":".join(sys.path), **environment}
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, capture_output=True, text=True, env=given, check=True)
    assert done.stdout.startswith(seen)


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
