"""The fast forms of a machine with AVX2 alone equal the reference, played on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.avx2_machine import AVX2_ONLY

REPOSITORY = Path(__file__).parents[2]
# Products in each form of weights, and what runs between them. Each inner loop of paged attention
# once: what its other tests compile are the same loops for several threads.
PAGED = "tests/gpu/attention/test_cpu.py"
TESTS = (
    *("tests/gpu/device/cpu/test_weights.py", "tests/gpu/layers/test_compiled.py"),
    "tests/kernels/cpu/test_quant_linear.py",
    "tests/kernels/cpu/test_gemm.py::test_a_row_is_the_same_whatever_stands_beside_it",
    f"{PAGED}::test_every_shape_equals_the_reference",
    f"{PAGED}::test_every_kind_of_layer_equals_the_reference",
)
# Whole models, and torch's own attention.
MORE = ("tests/parity/test_forms.py", "tests/gpu/attention/test_chunked_prefill.py")
# bfloat16 has instructions of its own beyond AVX2; float32 differs in the vectors' width alone, and
# its kernels take as long to compile.
CHOSEN = ("-k", "(not float32 or bfloat16) and not weight_of_a_byte_is_off")
IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first time, all its kernels are compiled
def test_the_parity_tests_pass_with_no_instructions_beyond_avx2() -> None:
    chosen = (*TESTS, *MORE) if IS_LARGE else (*TESTS, *CHOSEN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | AVX2_ONLY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
