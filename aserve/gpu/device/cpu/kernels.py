"""Chooses which compiled kernels this processor needs, and compiles those that are missing."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from aserve.gpu.device.cpu.isa import (
    KERNEL_DTYPES,
    CpuIsa,
    chunk_kv_dtype,
    has_chunk_attention,
    has_tiles,
    read_isa,
    widens_tiles,
)
from aserve.gpu.kv.store import FP8
from aserve.gpu.weights.format import dtype_name
from aserve.host.limits import usable_cpus
from aserve.progress import shown_progress

if TYPE_CHECKING:
    from aserve_kernels.cpu.build import KernelVariant

# What only some models, or models with some options, run.
ON_DEMAND = (
    *("lora", "latent_attention", "index_scores", "delta_rule", "state_space"),
    *("int8_linear", "int4_linear", "e2m1_linear"),
)

# Parts of a fused step that only some models have. A team of any size runs them.
IN_ONE_CALL = ("draft_forward", "delta_layer", "conv_layer", "mamba_layer", "expert_mlp")

logger = logging.getLogger(__name__)


def all_kernels(isa: CpuIsa) -> list[KernelVariant]:
    """Returns every variant that some model would run on this processor."""
    dtypes = KERNEL_DTYPES if isa.bf16_products else KERNEL_DTYPES[:1]
    variants: dict[KernelVariant, None] = {}
    for dtype in dtypes:
        for num_threads in (1, 2):
            variants |= dict.fromkeys(kernels_of(dtype, isa, num_threads=num_threads))
            some = _variants(ON_DEMAND, dtype, num_threads=num_threads)
            variants |= dict.fromkeys(some + _attention(dtype, isa, num_threads))
        if has_tiles(dtype, isa):
            variants |= dict.fromkeys(_variants(IN_ONE_CALL, dtype))
    return list(variants)


def kernels_of(dtype: torch.dtype, isa: CpuIsa, *, num_threads: int) -> list[KernelVariant]:
    """Returns the variants that a model of this dtype runs on so many threads.

    Without instructions for bfloat16, large models are float32 with weights and KV of bfloat16.
    """
    variants = _variants(["gated_mul", "rms_norm", "rope_and_store_kv"], dtype)
    if has_tiles(dtype, isa):
        variants += _kernels_of_tiles(dtype, isa, num_threads=num_threads)
    variants += _variants(["draw", "shared_table", "suffix_match"], torch.float32)
    if _is_widened(dtype, isa, num_threads):
        return variants
    return variants + _attention(dtype, isa, min(num_threads, 2))


def _attention(dtype: torch.dtype, isa: CpuIsa, num_threads: int) -> list[KernelVariant]:
    """Returns the kernels of attention for KV of the model's own dtype."""
    has_chunks = has_chunk_attention(dtype, isa)
    names = ["paged_attention", "chunk_attention"] if has_chunks else ["paged_attention"]
    return _variants(names, dtype, num_threads=num_threads)


def _kernels_of_tiles(dtype: torch.dtype, isa: CpuIsa, *, num_threads: int) -> list[KernelVariant]:
    """NOTE: weights of float32 are tiled in small models only, which run on one thread."""
    num = _team_of_tiles(dtype, isa, num_threads)
    if _is_widened(dtype, isa, num_threads):
        linears = _variants(["packed_bf16_linear"], dtype, num_threads=num)
        return linears + kernels_of_kv(dtype, torch.bfloat16, isa, num_threads=num)
    variants = _variants(["packed_linear"], dtype, num_threads=num)
    return variants + _variants(["decoder_layers", "decoder_forward"], dtype)


def _is_widened(dtype: torch.dtype, isa: CpuIsa, num_threads: int) -> bool:
    """Whether weights and KV of a model of this dtype are bfloat16."""
    is_large = _team_of_tiles(dtype, isa, num_threads) > 1
    return dtype == torch.float32 and has_tiles(dtype, isa) and is_large


def _team_of_tiles(dtype: torch.dtype, isa: CpuIsa, num_threads: int) -> int:
    """Returns how many threads share the products of tiles, as far as compilation differs."""
    is_shared = dtype == torch.bfloat16 or widens_tiles(isa)
    return min(num_threads, 2) if is_shared else 1


def _variants(
    names: Iterable[str], dtype: torch.dtype, *, num_threads: int = 1
) -> list[KernelVariant]:
    from aserve_kernels.cpu.build import KernelVariant

    return [KernelVariant(name, dtype_name(dtype), num_threads) for name in names]


def count_kernels() -> tuple[int, int]:
    """Returns how many kernels are compiled, and how many this processor needs; (0, 0) if there is
    no numba, which compiles them.
    """
    if importlib.util.find_spec("numba") is None:
        return 0, 0
    from aserve_kernels.cpu.build import missing_kernels

    wanted = all_kernels(read_isa())
    return len(wanted) - len(missing_kernels(wanted)), len(wanted)


def compile_all_kernels() -> tuple[int, int]:
    """Compiles what `count_kernels` finds missing, and returns how many it compiled, and of how
    many. Raises KernelBuildError.
    """
    if importlib.util.find_spec("numba") is None:
        return 0, 0
    wanted = all_kernels(read_isa())
    return _compile(wanted), len(wanted)


def compile_kernels_of(dtype: torch.dtype, *, num_threads: int) -> None:
    """Compiles the kernels for a model of this dtype on so many threads. A failure is only logged,
    because each kernel is compiled by its first user, too.
    """
    _try_compile(kernels_of(dtype, read_isa(), num_threads=num_threads))


def compile_kernels_for_kv(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Does the same for what a model of this dtype runs beside KV of another dtype: fp8, which no
    build ahead of time has, or bfloat16."""
    _try_compile(kernels_of_kv(dtype, kv_dtype, read_isa(), num_threads=torch.get_num_threads()))


def kernels_of_kv(
    dtype: torch.dtype, kv_dtype: torch.dtype, isa: CpuIsa, *, num_threads: int
) -> list[KernelVariant]:
    suffix, most = "fp8" if kv_dtype == FP8 else dtype_name(kv_dtype), min(num_threads, 2)
    variants = _variants([f"paged_attention_{suffix}"], dtype, num_threads=most)
    if chunk_kv_dtype(dtype, kv_dtype, isa) == kv_dtype:
        variants += _variants([f"chunk_attention_{suffix}"], dtype, num_threads=most)
    if has_tiles(dtype, isa):
        variants += _variants([f"decoder_layers_{suffix}", "decoder_forward"], dtype)
    return variants


def _try_compile(variants: list[KernelVariant]) -> None:
    from aserve_kernels.cpu.build import KernelBuildError

    try:
        _compile(variants)
    except (KernelBuildError, OSError) as error:
        logger.warning("kernels are compiled one after another, because %s", error)


def _compile(variants: list[KernelVariant]) -> int:
    """Returns how many were missing."""
    from aserve_kernels.cpu.build import build_kernels, missing_kernels

    missing = missing_kernels(variants)
    if missing:
        num_processes = usable_cpus()
        logger.info(
            "compiling %d kernels for this processor, in at most %d processes; later starts find "
            "them compiled",
            *(len(missing), num_processes),
        )
        with shown_progress("compiling kernels") as on_progress:
            build_kernels(missing, num_processes=num_processes, on_progress=on_progress)
    return len(missing)
