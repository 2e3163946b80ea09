"""Chooses the format of a model's weights on the CPU from the processor's instructions (`CpuIsa`),
the model's size and the user's options.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from aserve.errors import ConfigError
from aserve.gpu.device.cpu.isa import (
    KERNEL_DTYPES,
    CpuIsa,
    has_large_tiles,
    has_tiles,
    widens_tiles,
)
from aserve.gpu.device.cpu.linear import (
    linear_per_expert,
    per_token,
    prepare_fp16_stored,
    prepare_packed,
)
from aserve.gpu.layers.linear import prepare
from aserve.gpu.weights.format import WeightFormat, WeightRequest, dtype_name
from aserve.gpu.weights.int4 import INT4
from aserve.gpu.weights.mxfp4 import MXFP4

# The size of a small model's weights in float32. Its products end before a second thread has begun,
# and the event loop needs a core as well, so it runs in one thread. Without instructions for
# bfloat16 they take longer, and only a tiny model does.
# PERF: 16 streams of a model of 17 MB on 2 cores, one thread against two: ITL p99 6 and 16 ms;
# beside busy neighbours 1,950 and 810 tokens/s (bench serve).
SMALL_BYTES = 32 << 20
# The prefill cap of a small model's mixed steps. Prefills are spread over more steps, so that the
# decodes beside them wait less. A larger model would read its weights once more in each of these.
# PERF: 16 streams of 64 in and 64 out over HTTP, 2 cores, 64 requests, medians of four runs or
# more, with 40 / 60 / 80 / no bound: ITL p99 in medians 2.6 / 2.6 / 3.0 / 4.6, TTFT p99 in medians
# 2.8 / 2.8 / 1.9 / 1.6; tokens/s differ by less than the runs do.
SMALL_MIXED_PREFILL_TOKENS = 60
# The size up to which `auto` is always float32, so that the smallest models give the same tokens on
# every machine.
# PERF: the 16 streams above, CPU seconds of the executor thread for 1,000 tokens, machine busy:
# 0.20 in float32, 0.13 in bfloat16. So larger models use bfloat16 where the processor has it.
TINY_BYTES = 8 << 20


FACTOR_BITS = 2 * 16  # of the scale and the offset of a group of codes


def choose_cpu_format(request: WeightRequest, isa: CpuIsa) -> WeightFormat:
    format_ = replace(_quantized_format(request, isa), prepare_grouped=linear_per_expert)
    if _is_small(request):
        format_ = replace(format_, max_mixed_prefill_tokens=SMALL_MIXED_PREFILL_TOKENS)
    if _has_one_thread(request, isa):
        format_ = replace(format_, max_threads=1)
    if request.quantization is None and not request.is_deterministic:
        format_ = _tiled_format(format_, request, isa)
    format_ = _with_codes(format_, request, isa)
    if not request.is_deterministic:
        return format_
    about = f"{format_.about}, each token alone"
    return replace(format_, prepare=per_token(format_.prepare), about=about)


def _tiled_format(format_: WeightFormat, request: WeightRequest, isa: CpuIsa) -> WeightFormat:
    if not has_tiles(format_.dtype, isa):
        return format_
    from aserve.gpu.device.cpu.kernel_linear import prepare_experts, prepare_tiled

    if _has_one_thread(request, isa):
        return replace(format_, prepare=prepare_tiled, prepare_grouped=prepare_experts)
    return (
        replace(format_, prepare=prepare_tiled) if has_large_tiles(format_.dtype, isa) else format_
    )


def _quantized_format(request: WeightRequest, isa: CpuIsa) -> WeightFormat:
    format_ = _unquantized_format(request, isa)
    if request.quantization is None:
        return format_
    if format_.dtype not in KERNEL_DTYPES:
        raise ConfigError(
            f"--quantization {request.quantization} multiplies in float32 or bfloat16 on the CPU, "
            f"not in {dtype_name(format_.dtype)}"
        )
    if not isa.has_numba:
        raise ConfigError(
            f"--quantization {request.quantization} needs numba, which is not installed"
        )
    from aserve.gpu.device.cpu.kernel_linear import PREPARE_QUANTIZED, QUANTIZATIONS

    name = request.quantization
    if name not in QUANTIZATIONS:
        raise ConfigError(
            f"--quantization {name} is not made for the CPU; choose {' or '.join(QUANTIZATIONS)}",
            param="quantization",
        )
    about = f"{dtype_name(format_.dtype)} with {name} weights"
    return replace(
        format_, prepare=PREPARE_QUANTIZED[name], about=about, stored_bits=QUANTIZATIONS[name]
    )


def _with_codes(format_: WeightFormat, request: WeightRequest, isa: CpuIsa) -> WeightFormat:
    """Keeps layers and experts that the checkpoint has in 4 bits as they are, where they can be
    multiplied, and those in GGUF."""
    is_kept = request.quantization is None and request.stored_quantization in (INT4, MXFP4)
    if not (is_kept and isa.has_numba and format_.dtype in KERNEL_DTYPES):
        return format_
    from aserve.gpu.device.cpu.kernel_linear import with_codes

    about = f"{format_.about}, quantized layers as they are"
    return replace(
        format_,
        prepare=with_codes(format_.prepare),
        about=about,
        factor_bits=FACTOR_BITS,
    )


def _unquantized_format(request: WeightRequest, isa: CpuIsa) -> WeightFormat:
    if request.given is None:
        is_small = (
            _is_small(request, TINY_BYTES) if isa.bf16_products else _has_one_thread(request, isa)
        )
        if is_small:
            return _format_of(torch.float32, isa, why="auto: a small model")
        if isa.bf16_products:
            why = f"auto: the processor has {isa.bf16_products}"
            return _format_of(torch.bfloat16, isa, why=why)
    why = f"{request.dtype}: no instructions for bfloat16"
    if _is_widened(request, isa):
        from aserve.gpu.device.cpu.kernel_linear import prepare_bf16_stored

        about = f"float32 with weights stored as bfloat16 ({why})"
        return WeightFormat(
            torch.float32, prepare_bf16_stored, about, stored_bits=16, kv_dtype=torch.bfloat16
        )
    if request.given is not None:
        return _format_of(request.given, isa, why="")
    if isa.has_fbgemm:
        about = f"float32 with weights stored as float16 ({why})"
        return WeightFormat(torch.float32, prepare_fp16_stored, about, stored_bits=16)
    return _format_of(torch.float32, isa, why="auto: the processor has no 16-bit products")


def _is_widened(request: WeightRequest, isa: CpuIsa) -> bool:
    """Whether a model has weights and KV of bfloat16, as the user says or else the checkpoint, and
    float32 inputs, since the processor has no products of bfloat16.

    PERF: 8 rows of the 0.6B shape, AVX2: 125 and 132 ms per step, in turns with torch's products of
    bfloat16, 687 and 704, whose prefill takes 6.6 to 7.2 times as long.
    """
    bfloat16 = dtype_name(torch.bfloat16)
    name = request.stored if request.given is None else request.dtype
    return name == bfloat16 and widens_tiles(isa) and not _is_small(request, TINY_BYTES)


def _has_one_thread(request: WeightRequest, isa: CpuIsa) -> bool:
    """Whether the model is small enough to compute in one thread.

    PERF: with AVX2 alone, 16 rows of a model of 17 MB in float32 take 4.7 to 7.5 ms on one thread,
    and 2.7 ms on two with weights of bfloat16.
    """
    is_tiled = request.quantization is None and _is_widened(request, isa)
    return _is_small(request, TINY_BYTES if is_tiled else SMALL_BYTES)


def _is_small(request: WeightRequest, most_bytes: int = SMALL_BYTES) -> bool:
    return request.num_weights * torch.float32.itemsize <= most_bytes


def _format_of(dtype: torch.dtype, isa: CpuIsa, *, why: str) -> WeightFormat:
    """Weights of exactly this dtype, packed where oneDNN supports it."""
    is_packed = isa.has_onednn and (
        dtype == torch.float32 or (dtype == torch.bfloat16 and isa.bf16_products is not None)
    )
    about = dtype_name(dtype) + (f" ({why})" if why else "")
    return WeightFormat(dtype, prepare_packed if is_packed else prepare, about)
