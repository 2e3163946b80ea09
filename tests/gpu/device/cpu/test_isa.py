"""What is known of the processor follows what its user lets the libraries do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.avx2_machine import AVX2_ONLY

# The words of one line: bfloat16, vectors, and the dtype and bits of weights of a large model.
PROGRAM = """
from aserve.gpu.device.cpu.weights import read_isa
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.weights.format import WeightRequest
isa = read_isa()
format_ = choose_cpu_format(WeightRequest("auto", "bfloat16", 1 << 30), isa)
print(isa.bf16_products, isa.has_avx512, format_.dtype, format_.stored_bits)
print(format_.about)
"""


def seen(environment: dict[str, str]) -> str:
    given = {**os.environ, "PYTHONPATH": ":".join(sys.path), **environment}
    program = [sys.executable, "-c", PROGRAM]
    return subprocess.run(program, capture_output=True, text=True, env=given, check=True).stdout


@pytest.mark.slow
def test_a_machine_with_avx2_alone_stores_float16_and_multiplies_float32() -> None:
    assert seen(AVX2_ONLY).splitlines() == [
        "None False torch.float32 16",
        "float32 with weights stored as float16 (auto: no instructions for bfloat16)",
    ]


@pytest.mark.slow
def test_no_product_of_bfloat16_is_chosen_that_onednn_may_not_use() -> None:
    """A user who caps it alone."""
    assert seen({"ONEDNN_MAX_CPU_ISA": "AVX2"}).startswith("None ")
