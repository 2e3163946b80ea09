"""Compiles every Triton kernel to machine code for the supported GPUs, without a GPU.

This finds errors that Triton's interpreter does not. It is a program of its own, so that kernels
are defined without the interpreter. The wrappers run unchanged, but each launch compiles its kernel
instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, KernelParam, mangle_type

from aserve_kernels.bitmask import apply_bitmask
from aserve_kernels.gated_mul import KINDS, gated_mul
from aserve_kernels.invariant_linear import WIDE_FROM, invariant_linear
from aserve_kernels.kv_indices import kv_indices
from aserve_kernels.kv_indptr import KvIndptr, kv_indptr
from aserve_kernels.paged_rows import Scoring
from aserve_kernels.paged_tiles import KvSplits
from aserve_kernels.penalties import penalise
from aserve_kernels.prepare_inputs import PackedInputs, Tables, prepare_inputs
from aserve_kernels.relay_rows import gather_rows, scatter_rows
from aserve_kernels.rms_norm import add_rms_norm, rms_norm
from aserve_kernels.rope_and_store_kv import rope_and_store_kv
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS
from aserve_kernels.sample import sample
from tests.kernels import paged_case

AMPERE, HOPPER = 80, 90


def call_norms() -> None:
    x = torch.zeros((2, 300), dtype=torch.bfloat16)
    rms_norm(x, x[0], 1e-6)
    add_rms_norm(x, x, x[0], 1e-6, 0.5)


def call_gated_mul() -> None:
    for kind in KINDS:
        gated_mul(torch.zeros((2, 600), dtype=torch.bfloat16), kind)


def call_rope_and_store_kv(dtype: torch.dtype = torch.bfloat16) -> None:
    """RoPE on part of a head; on whole heads, with QK norm; none, as where the model applies it."""
    heads = torch.zeros((2, 7, 128), dtype=torch.bfloat16)
    slots, pool = torch.tensor([1, 2]), torch.zeros((4, 2, 128)).to(dtype)
    for cos_sin, weight in ((heads[:, 0, :64], None), (heads[:, 0], torch.zeros((5, 128)))):
        rope_and_store_kv(heads, slots, (pool, pool), cos_sin=cos_sin, weight=weight)
    rope_and_store_kv(heads, slots, (pool, pool), cos_sin=None)


def call_invariant_linear(num_outs: int = 300) -> None:
    x = torch.zeros((2, 128), dtype=torch.bfloat16)
    invariant_linear(x, x.new_zeros((num_outs, 128)), x.new_zeros(num_outs))


DECODE_AND_CHUNK = paged_case.Case(
    ((1, 70), (40, 90)), heads=(16, 4), head_dim=128, dtype=torch.bfloat16
)


def call_paged(case: paged_case.Case = DECODE_AND_CHUNK) -> None:
    paged_case.run(paged_case.OPS, paged_case.make_inputs(case), case)


def row_tables() -> tuple[Tensor, Tensor]:
    ints = torch.zeros((4, len(INT_COLUMNS)), dtype=torch.int64)
    return ints, torch.ones((4, len(FLOAT_COLUMNS)), dtype=torch.float64)


def call_sample(
    vocab_size: int = 9000,
    *,
    dtype: torch.dtype = torch.float32,
    has_noise: bool = True,
    has_limits: bool = True,
) -> None:
    logits, rows = torch.zeros((2, vocab_size), dtype=dtype), torch.tensor([1, 3])
    sample(logits, rows, rows, *row_tables(), has_noise=has_noise, has_limits=has_limits)


def call_prepare_inputs(num: int = 3) -> None:
    some, table = torch.zeros(num, dtype=torch.int32), torch.zeros((4, 8), dtype=torch.int64)
    words = PackedInputs(some, some, some, some, some, some, some)
    for seq_lens in (None, table[:, 0]):
        pools = (table, table)
        prepare_inputs(words, Tables(table[:, 0], seq_lens, pools, some, page_size=16))


def call_relay_rows() -> None:
    rows = torch.tensor([1, 2])
    for table in (torch.zeros(4, dtype=torch.int64), torch.zeros((4, 3), dtype=torch.bfloat16)):
        gather_rows(table, rows)
        scatter_rows(table, rows, table[:2], rows, rows)


def call_penalise() -> None:
    logits, rows = torch.zeros((2, 9000)), torch.tensor([1, 3])
    of_tokens = (torch.zeros((4, 8), dtype=torch.int64), torch.zeros(64, dtype=torch.int32), 16)
    penalise(logits, rows, rows, rows, row_tables(), of_tokens, 100)


def call_bitmask() -> None:
    apply_bitmask(torch.zeros((2, 9000)), torch.zeros((2, 282), dtype=torch.int32))


def call_gather_pages() -> None:
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    table = torch.zeros((4, 600), dtype=torch.int64)
    kv_indices(table, table[0, :2], first_columns=starts[:2], indptr=starts, out=starts.clone())


def call_page_starts() -> None:
    lens = torch.tensor([1, 3, 5], dtype=torch.int64)
    firsts, starts = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    for window in (None, 40):
        out = KvIndptr(firsts, starts, firsts)
        kv_indptr(lens[:2], lens, window=window, page_size=16, out=out)


CALLS: Mapping[str, Callable[[], None]] = {
    "norms": call_norms,
    "gated_mul": call_gated_mul,
    "rope_and_store_kv": call_rope_and_store_kv,
    "kv_indices": call_gather_pages,
    "kv_indptr": call_page_starts,
    "invariant_linear": call_invariant_linear,
    "paged": call_paged,
    "sample": call_sample,
    "penalise": call_penalise,
    "relay_rows": call_relay_rows,
    "prepare_inputs": call_prepare_inputs,
    "bitmask": call_bitmask,
}
# Variants of these kernels are compiled for one architecture only.
HOPPER_CALLS: Mapping[str, Callable[[], None]] = {
    "invariant_linear, many outputs": lambda: call_invariant_linear(WIDE_FROM),
    "paged, fixed splits": lambda: call_paged(
        replace(DECODE_AND_CHUNK, splits=KvSplits(fixed_split=1024))
    ),
    "paged, window and cap": lambda: call_paged(
        replace(DECODE_AND_CHUNK, head_dim=256, scoring=Scoring(0.1, window=30, softcap=50.0))
    ),
    "sample, greedy": lambda: call_sample(has_noise=False, has_limits=False),
    "sample of bfloat16": lambda: call_sample(dtype=torch.bfloat16),
    "sample, noise": lambda: call_sample(1, has_limits=False),
    "prepare_inputs of one token": lambda: call_prepare_inputs(1),
    "rope_and_store_kv to 8 bits": lambda: call_rope_and_store_kv(torch.float8_e4m3fn),
    "paged of 8 bits": lambda: call_paged(replace(DECODE_AND_CHUNK, kv_dtype=torch.float8_e4m3fn)),
}


# Kernels whose loop over tiles must be software-pipelined with asynchronous copies (cp.async).
PIPELINED = frozenset({"_attend_splits", "_attend_blocks", "_multiply"})
ALIGNED = 16  # the divisor of addresses and integers that Triton specialises for


class Compiler:
    """Replaces the launch of a kernel by its compilation, and counts in `num_compiled`."""

    def __init__(self, capability: int) -> None:
        self.num_compiled = 0
        self._target = GPUTarget("cuda", capability, 32)

    def run(self, kernel: JITFunction, *args: object, **kwargs: object) -> None:
        options = {name: kwargs[name] for name in ("num_warps", "num_stages") if name in kwargs}
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        # As in a launch, an integer of 1 is specialised as a constant.
        types = {name: mangle_type(value, specialize=True) for name, value in values.items()}
        types |= {p.name: "constexpr" for p in kernel.params if p.is_constexpr}
        constants = {name: values[name] for name, kind in types.items() if kind == "constexpr"}
        attributes = {
            (index,): [["tt.divisibility", ALIGNED]]
            for index, param in enumerate(kernel.params)
            if param.name not in constants and _is_aligned(values[param.name], param)
        }
        source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
        made = triton.compile(source, target=self._target, options=options)
        name = kernel.fn.__name__
        assert name not in PIPELINED or "cp.async" in made.asm["ptx"], (
            f"{name} has no asynchronous copies"
        )
        self.num_compiled += 1


def _is_aligned(value: object, param: KernelParam) -> bool:
    """Whether a launch would specialise for alignment; device memory is always aligned."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value % ALIGNED == 0 and not param.do_not_specialize
    return isinstance(value, Tensor)


def compile_all(capability: int, calls: Mapping[str, Callable[[], None]]) -> None:
    compiler = Compiler(capability)
    JITFunction.run = lambda kernel, *args, grid, warmup, **kwargs: compiler.run(
        kernel, *args, **kwargs
    )
    for name, call in calls.items():
        before, start = compiler.num_compiled, time.perf_counter()
        call()
        assert compiler.num_compiled > before, f"{name} launches nothing"
        sys.stdout.write(f"sm_{capability} {name}: {time.perf_counter() - start:.1f} s\n")


if __name__ == "__main__":
    compile_all(AMPERE, CALLS)
    compile_all(HOPPER, {**CALLS, **HOPPER_CALLS})
