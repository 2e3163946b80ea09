"""The form in which this processor reads weights fastest. Decoding reads all of them in each step,
so bytes count; but half types are fast only where there are instructions for their products.

It knows no model. The table behind it is in docs/performance.md, "Linears".
"""

from __future__ import annotations

from dataclasses import replace

import torch

from aserve.errors import ConfigError
from aserve.gpu.device.cpu_facts import CpuFacts
from aserve.gpu.layers.each_alone import each_alone
from aserve.gpu.layers.half_stored_linear import prepare_half_stored
from aserve.gpu.layers.linear import prepare
from aserve.gpu.layers.packed_linear import prepare_packed
from aserve.gpu.weights.form import WeightForm, WeightWish, dtype_name

# In float32. Products of so small a model end before a second thread has begun, and the event loop
# wants a core as well.
# PERF: 16 streams of a model of 17 MB on 2 cores, one thread against two: ITL p99 6 and 16 ms;
# beside busy neighbours 1,950 and 810 tokens/s (bench serve).
SMALL_BYTES = 32 << 20
# Part of a prompt joins a step, not all that are there, so that streams wait less. A larger model
# reads its weights in each of the more steps.
# PERF: 16 streams of 64 in and 64 out over HTTP, 2 cores, 64 requests, medians of four runs or
# more, with 40 / 60 / 80 / no bound: ITL p99 in medians 2.6 / 2.6 / 3.0 / 4.6, TTFT p99 in medians
# 2.8 / 2.8 / 1.9 / 1.6; tokens/s differ by less than the runs do.
SMALL_MIXED_TOKENS = 60
# In float32, too. The smallest models answer alike on every machine.
# PERF: the 16 streams above, CPU seconds of the device's thread for 1,000 tokens, machine busy:
# 0.20 in float32, 0.13 in bfloat16. So others are not held to float32.
TINY_BYTES = 8 << 20


def choose_cpu_form(wish: WeightWish, facts: CpuFacts) -> WeightForm:
    form = _chosen_form(wish, facts)
    if _is_small(wish):
        form = replace(form, max_threads=1, mixed_prompt_tokens=SMALL_MIXED_TOKENS)
    if wish.is_deterministic:
        about = f"{form.about}, each token alone"
        return replace(form, prepare=each_alone(form.prepare), about=about)
    if _is_small(wish) and wish.quantization is None and _has_tiles(form.dtype, facts):
        from aserve.gpu.layers.tiled_linear import prepare_tiled
        from aserve.gpu.models.compiled_forward import make_compiled_forward

        form = replace(form, prepare=prepare_tiled, shortcut=make_compiled_forward)
    return form


def _has_tiles(dtype: torch.dtype, facts: CpuFacts) -> bool:
    if not (facts.has_numba and facts.has_wide_vectors and facts.has_onednn):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and facts.bf16_products is not None)


def _chosen_form(wish: WeightWish, facts: CpuFacts) -> WeightForm:
    form = _unquantized_form(wish, facts)
    if wish.quantization is None:
        return form
    if form.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"--quantization {wish.quantization} multiplies in float32 or bfloat16 on the CPU, "
            f"not in {dtype_name(form.dtype)}"
        )
    if not facts.has_numba:
        raise ConfigError(f"--quantization {wish.quantization} needs numba, which is not installed")
    from aserve.gpu.quant.int8_linear import prepare_int8

    return WeightForm(
        form.dtype, prepare_int8, f"{dtype_name(form.dtype)} with int8 weights", stored_bits=8
    )


def _unquantized_form(wish: WeightWish, facts: CpuFacts) -> WeightForm:
    given = wish.given
    if given is not None:
        return _form(given, facts, why="")
    if _is_small(wish, TINY_BYTES if facts.bf16_products else SMALL_BYTES):
        return _form(torch.float32, facts, why="auto: a small model")
    if facts.bf16_products:
        return _form(torch.bfloat16, facts, why=f"auto: the processor has {facts.bf16_products}")
    if facts.has_fbgemm:
        about = "float32 with weights stored as float16 (auto: no instructions for bfloat16)"
        return WeightForm(torch.float32, prepare_half_stored, about, stored_bits=16)
    return _form(torch.float32, facts, why="auto: the processor has no half types")


def _is_small(wish: WeightWish, most_bytes: int = SMALL_BYTES) -> bool:
    return wish.num_weights * torch.float32.itemsize <= most_bytes


def _form(dtype: torch.dtype, facts: CpuFacts, *, why: str) -> WeightForm:
    """Exactly this dtype, packed where oneDNN can."""
    is_packed = facts.has_onednn and (
        dtype == torch.float32 or (dtype == torch.bfloat16 and facts.bf16_products is not None)
    )
    about = dtype_name(dtype) + (f" ({why})" if why else "")
    return WeightForm(dtype, prepare_packed if is_packed else prepare, about)
