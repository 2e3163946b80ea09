"""`aserve doctor` and `aserve kernels build`: what they say of this machine and of others."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aserve.cli import main
from aserve.config import KvOptions, ModelOptions, cache_home
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.doctor import PACKAGES, CudaDevice, Findings, advice, examine, report
from aserve.gpu.links import Links
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.supported import backend_rows, family_rows
from aserve.options.option import options_of

LINKS = Links(None, None, None, 0, (), shared_rate=5.0, loopback_rate=2.0)
GPUS = Links("2.28", "1.0", None, 2, (), shared_rate=5.0, loopback_rate=2.0)
GPU = CudaDevice("NVIDIA H200", 139 << 30)
GOOD = Findings(
    versions=dict.fromkeys(PACKAGES, "1.0"),
    python="3.11.7",
    system="Linux",
    cpu_name="A processor",
    num_cores=8,
    usable_cpus=8,
    cpu_quota=None,
    instructions=("avx2", "avx512_bf16"),
    bf16_products="AVX512-bf16",
    has_avx512=True,
    free_memory_bytes=32 << 30,
    shared_bytes=1 << 31,
    memory_limit_bytes=None,
    has_cuda_driver=False,
    torch_cuda=None,
    cuda_devices=(),
    kernel_cache=cache_home() / "aserve" / "kernels-1",
    num_compiled_kernels=17,
    num_kernels=17,
    links=LINKS,
)


def without(package: str) -> dict[str, str | None]:
    return GOOD.versions | {package: None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_compiled_kernels": 3}, "14 kernels are not compiled yet"),
        ({"kernel_cache": None}, "every start compiles all kernels"),
        ({"kernel_cache": Path("/tmp/aserve-1")}, "kept in the temporary folder /tmp/aserve-1"),
        ({"versions": without("numba"), "num_kernels": 0}, "Install numba"),
        ({"cpu_quota": 1.5}, "may use 1.5 of 8 cores"),
        ({"bf16_products": None}, "no instructions for products of bfloat16"),
        ({"free_memory_bytes": 1 << 30}, "Only 1.0 GiB of memory are free"),
        ({"has_cuda_driver": True}, "torch is built without CUDA"),
        ({"has_cuda_driver": True, "torch_cuda": "13.0"}, "torch is built for CUDA 13.0"),
        (
            {"cuda_devices": (GPU,), "versions": without("flashinfer-python")},
            "FlashInfer is not installed",
        ),
        (
            {
                "cuda_devices": (GPU,),
                "versions": GOOD.versions | {"flashinfer-python": "0.6.18.post1"},
            },
            "Install flashinfer-python 0.7",
        ),
        ({"shared_bytes": 64 << 20}, "Only 64 MiB of shared memory"),
        ({"links": replace(LINKS, shared_rate=0.2)}, "shared memory run at 0.2 GiB/s"),
        ({"links": replace(LINKS, loopback_rate=0.1)}, "loopback interface carries 0.1 GiB/s"),
        (
            {"cuda_devices": (GPU, GPU), "links": replace(GPUS, apart=((0, 1),))},
            "GPUs 0 and 1 cannot read",
        ),
        ({"cuda_devices": (GPU, GPU), "links": replace(GPUS, nccl=None)}, "without NCCL"),
        ({"cuda_devices": (GPU, GPU), "links": replace(GPUS, nixl=None)}, "NIXL is not installed"),
    ],
)
def test_each_finding_that_costs_speed_has_one_advice(changes: dict[str, Any], words: str) -> None:
    (hint,) = advice(replace(GOOD, **changes))
    assert words in hint


def test_a_good_machine_gets_no_advice_and_a_gpu_none_about_the_cpu() -> None:
    assert list(advice(GOOD)) == []
    assert list(report(GOOD))[-1] == "Nothing was found that would make it faster."
    assert "  ranks         exchange through /dev/shm, 2.0 GiB free" in report(GOOD)
    with_gpu = replace(GOOD, cuda_devices=(GPU,), bf16_products=None, cpu_quota=1.0)
    assert list(advice(with_gpu)) == []
    assert "  device        NVIDIA H200 (139.0 GiB)" in report(with_gpu)


def test_what_is_found_on_this_machine_is_told_line_by_line() -> None:
    shown = "\n".join(report(examine()))
    own = ("CPU", "memory", "device", "instructions", "NCCL", "NIXL", "Ray", "shared memory")
    for word in (*PACKAGES, *own, "loopback"):
        assert word in shown


@pytest.mark.slow
def test_kernels_build_says_what_it_found_compiled() -> None:
    """Numba compiles nothing here, so all kernels count as there."""
    command = [sys.executable, "-m", "aserve", "kernels", "build"]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert shown.stdout.startswith("aserve: 0 kernels compiled, ")


def test_the_list_of_models_has_every_family_and_backend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert {architecture for _, architecture, _ in family_rows()} == FAMILIES.keys()
    rows = {row[0]: row for row in backend_rows()}
    assert rows.keys() == BACKENDS.keys()
    assert "sinks" in rows["torch-ref"][4]
    assert "draft trees" in rows["torch-ref"][5]
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM" in printed
    words = " ".join(printed.split())
    assert "Devices: cpu, cuda" in words
    assert "fp8" in rows["torch-ref"][3]
    assert rows["paged-cpu"][3] == "bfloat16, fp8"
    for option in options_of(ModelOptions, KvOptions):
        if option.name in ("dtype", "quantization", "kv_cache_dtype"):
            named = [choice for choice in option.limits.choices if choice != "auto"]
            assert f"{', '.join(named)} by {option.flag}" in words
