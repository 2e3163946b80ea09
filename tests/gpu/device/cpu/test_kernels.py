"""The list of kernels that are compiled ahead is that of the kernels that models run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aserve.gpu.device.cpu.isa import AMX, AVX512_BF16, CpuIsa
from aserve.gpu.device.cpu.kernels import all_kernels, compile_kernels_of, kernels_of, kernels_of_kv
from aserve.gpu.kv.store import FP8
from aserve.tiny import MODEL_DIR
from aserve_kernels.cpu import build

AVX512 = CpuIsa(
    bf16_products=AVX512_BF16,
    has_onednn=True,
    has_fbgemm=True,
    has_numba=True,
    has_avx2=True,
    has_avx512=True,
)
AVX2 = replace(AVX512, bf16_products=None, has_avx512=False)

# Numba's functions that were compiled for calls know their signatures, also when they were loaded.
PROGRAM = """
import sys
from pathlib import Path
from aserve.host.environment import prepare_process
prepare_process(2)
import torch
from numba.core.dispatcher import Dispatcher
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.device.cpu.kernels import kernels_of
from aserve.gpu.device.cpu.isa import read_isa
from aserve.gpu.device.cpu.weights import SMALL_BYTES, choose_cpu_format
from aserve.gpu.weights.format import WeightRequest
from aserve_kernels.cpu.build import COMPILERS

def compiled():
    modules = [sys.modules[name] for name in list(sys.modules) if "aserve_kernels.cpu" in name]
    found = [item for module in modules for item in vars(module).values()]
    functions = [item for item in found if isinstance(item, Dispatcher) and not item._can_compile]
    return {(item.py_func.__qualname__, str(item.signatures)) for item in functions}

model, dtype, num_threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
# A processor without products of bfloat16 widens large models of it.
chosen = choose_cpu_format(WeightRequest(dtype, None, SMALL_BYTES), read_isa()).dtype
for kernel, name, threads in kernels_of(chosen, read_isa(), num_threads=num_threads):
    COMPILERS[kernel](getattr(torch, name), threads)
before = compiled()
build_executor(BuildOptions(model, load_format="dummy", dtype=dtype, num_pages=8, max_rows=2))
assert torch.get_num_threads() == num_threads
assert before and compiled() <= before, compiled() - before
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first time, its kernels are compiled
@pytest.mark.parametrize(
    ("dtype", "num_threads", "intermediate_size"),
    [("float32", 1, None), ("bfloat16", 2, 1 << 15)],
)
def test_an_engine_compiles_no_kernel_that_the_list_has_not(
    dtype: str, num_threads: int, intermediate_size: int | None, tmp_path: Path
) -> None:
    """A small model runs on one thread, a larger one on those of the machine."""
    config = json.loads((MODEL_DIR / "config.json").read_text())
    if intermediate_size is not None:
        config |= {"intermediate_size": intermediate_size, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), dtype, str(num_threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_kernels_of_a_machine_are_those_of_its_instructions_and_all_that_models_run() -> None:
    every, on_avx2 = all_kernels(AVX512), all_kernels(AVX2)
    # Of large models in float32, whose weights and KV are bfloat16.
    attention = {"chunk_attention_bfloat16", "paged_attention_bfloat16"}
    mixed = {"packed_bf16_linear", "decoder_layers_bfloat16"} | attention
    assert len(every) == len(set(every))
    # Compiled when KV is to be fp8.
    by_option = {"decoder_layers_fp8", "paged_attention_fp8", "chunk_attention_fp8"}
    assert {variant.kernel for variant in every} == set(build.COMPILERS) - by_option - mixed
    for dtype in (torch.float32, torch.bfloat16):
        for num_threads in (1, 2, 8):
            assert set(kernels_of(dtype, AVX512, num_threads=num_threads)) <= set(every)
    assert {variant.kernel for variant in on_avx2} == set(build.COMPILERS) - by_option
    assert {variant.dtype for variant in on_avx2} == {"float32"}
    assert all_kernels(replace(AVX512, bf16_products=AMX)) == every


@pytest.mark.parametrize("has_fast_pairs", [True, False])
def test_the_kernel_that_reads_fp8_for_prompts_is_compiled_ahead_where_no_copy_is_read(
    monkeypatch: pytest.MonkeyPatch, has_fast_pairs: bool
) -> None:
    """A start compiled it by itself, on processors that multiply pairs of bfloat16 slowly."""
    monkeypatch.setattr("aserve_kernels.cpu.chunk_tiles.HAS_PAIRS", has_fast_pairs)
    variants = kernels_of_kv(torch.bfloat16, FP8, AVX512, num_threads=1)
    has_it = "chunk_attention_fp8" in {variant.kernel for variant in variants}
    assert has_it != has_fast_pairs


def test_an_engine_starts_although_the_workers_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aserve_kernels.cpu.build.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with caplog.at_level(logging.INFO):
        compile_kernels_of(torch.float32, num_threads=1)
    first, *_, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("compiling ")
    assert "has ended" in last
