"""What a figure says of the machine it was measured on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.avx2_machine import AVX2_ONLY

PROGRAM = "from aserve.bench.machine import read_machine; print(*read_machine().flags)"


@pytest.mark.slow
def test_a_measurement_names_no_instructions_that_the_environment_hides() -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), **AVX2_ONLY}
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "avx2\n"
