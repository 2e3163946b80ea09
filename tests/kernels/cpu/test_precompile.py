"""Kernels are compiled before they are called, once for all processes, with a log line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit, types

from aserve_kernels.cpu.precompile import compile_ahead

TRIPLE = """
import ctypes
import logging
import numpy as np
from numba import types
from aserve_kernels.cpu.memory import array_at
from aserve_kernels.cpu.callback import call_at, compile_callback
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead
logging.basicConfig(level="INFO")
@cached_njit(nogil=True)
def triple(numbers):
    for i in range(numbers.shape[0]):
        numbers[i] = 3 * numbers[i]
LIKE = np.empty(0, np.float32)
def triple_at(address):
    array_at(address, (1,), LIKE)[0] *= 3
if __name__ == "__main__":
    compile_ahead(triple, types.Array(types.float32, 1, "C"))
    numbers = np.ones(2, np.float32)
    triple(numbers)
    assert numbers.tolist() == [3, 3]
    call_at(compile_callback(triple_at, 1).address, (numbers.ctypes.data,))
    assert numbers.tolist() == [9, 3]
"""
# Tests that pass with the plain functions that stand for compiled ones, within seconds.
REPOSITORY, FOLDER = Path(__file__).parents[3], "tests/kernels/cpu"
CHUNK = "test_chunk_attention.py::test_every_chunk_equals_the_reference"
HEADS = "test_paged_attention.py::test_heads_of_every_width_equal_the_reference"
PLAIN_PRODUCTS = (
    *(("float32", "int8-False-9"), ("bfloat16", "int8-True-3")),
    *(("bfloat16", "int4-True-9"), ("bfloat16", "e2m1-False-2")),
)
PLAIN_DTYPES = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))
PLAIN_CHUNKS = ("bfloat16", "float32 with KV of bfloat16")
PRODUCT = "test_gemm.py::test_every_shape_equals_the_reference"
QUANT = "test_quant_linear.py::test_every_shape_equals_the_reference"
PLAIN = (
    *("test_intrinsics.py", "test_product.py", "test_softmax_weights.py"),
    *(f"{QUANT}[torch.{dtype}-{numbers}]" for dtype, numbers in PLAIN_PRODUCTS),
    *(f"{PRODUCT}[torch.{dtype}-torch.{stored}-34-1-2]" for dtype, stored in PLAIN_DTYPES),
    f"{PRODUCT}[torch.bfloat16-torch.bfloat16-128-96-17]",
    *(f"{HEADS}[1-torch.float32-1]", f"{HEADS}[32-torch.bfloat16-1]"),
    *(f"{CHUNK}[queries that fill no product-1-{kind}]" for kind in PLAIN_CHUNKS),
    "test_draw.py::test_the_first_of_equal_logits_is_taken",
    "test_rms_norm.py::test_every_shape_equals_the_reference",
    "test_rope_and_store_kv.py::test_normed_heads_are_rounded_where_torch_rounds_them",
    "test_rope_and_store_kv.py::test_tokens_of_one_slot_disturb_no_other",
)
FLOATS = types.Array(types.float32, 1, "C")


@njit(nogil=True)
def _doubled(x: float) -> float:
    return 2 * x


@njit(nogil=True)
def _double(numbers: npt.NDArray[np.float32]) -> None:
    for i in range(numbers.shape[0]):
        numbers[i] = _doubled(numbers[i])


def test_a_kernel_is_compiled_once_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        compile_ahead(_double, FLOATS)
        compile_ahead(_double, FLOATS)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["compiling a kernel for this and all later starts: _double"]
    numbers = np.ones(2, np.float32)
    _double(numbers)
    assert numbers.tolist() == [2, 2]


@njit(nogil=True)
def _halve(numbers: npt.NDArray[np.float32]) -> None:
    for i in range(numbers.shape[0]):
        numbers[i] *= 0.5


def test_threads_compile_one_kernel_for_other_types_at_the_same_time() -> None:
    """The first to end disabled compiling for the others, which raised."""
    kinds = (types.float32, types.float64, types.int32, types.int64)
    begin = threading.Barrier(len(kinds))

    def compile_for(kind: types.Type) -> None:
        begin.wait()
        compile_ahead(_halve, types.Array(kind, 1, "C"))

    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(compile_for, kinds))
    assert len(_halve.signatures) == len(kinds)
    with pytest.raises(TypeError):
        _halve(np.ones(2, np.int8))


@pytest.mark.slow
def test_the_kernels_run_without_a_compiler() -> None:
    """NUMBA_DISABLE_JIT=1 is how one steps through them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"{FOLDER}/{test}" for test in PLAIN]
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_processes_that_start_together_compile_a_kernel_once(tmp_path: Path) -> None:
    """The others wait, and read the cache that the first one wrote."""
    (tmp_path / "triple.py").write_text(TRIPLE)
    environment = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    command = [sys.executable, "-m", "triple"]
    started = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert sum(text.count("compiling a kernel") for text in said) == 2, said


def test_a_full_disk_costs_later_starts_a_compilation_and_this_one_nothing(tmp_path: Path) -> None:
    """A limit of the file size stands for the full disk."""
    (tmp_path / "triple.py").write_text(TRIPLE)
    environment = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    environment |= {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    (tmp_path / "cache").mkdir()
    limited = ["/bin/sh", "-c", 'ulimit -f 0; trap "" XFSZ; exec "$@"', "sh"]
    command = [*limited, sys.executable, "-m", "triple"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be kept for later starts") == 2
