"""The CPU's fused operators: rope and KV store, RMS norms, gated activations, the draw of tokens.

Each is a numba kernel. For few tokens it runs in one thread; for many, threads divide them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from aserve.gpu.kv.store import RopeAndStoreKv, Scales, rope_then_store_kv
from aserve.gpu.layers.mlp import GatedActivation
from aserve.gpu.layers.norm import AddNorm
from aserve.gpu.layers.ops import Elementwise
from aserve.gpu.layers.rope import RopeInputs
from aserve.gpu.lora.tables import LoraOps
from aserve.gpu.sampling.draw import draw_tokens
from aserve.gpu.sampling.ops import SampleOps
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.plan import SamplePlan
from aserve_kernels.cpu.delta_rule import advance_rows, compile_advance_rows, fits_blocks
from aserve_kernels.cpu.draw import compile_draw, draw
from aserve_kernels.cpu.gated_mul import compile_gated_mul, gated_mul
from aserve_kernels.cpu.lora import add_lora, compile_lora
from aserve_kernels.cpu.rms_norm import compile_rms_norm, rms_norm
from aserve_kernels.cpu.rope_and_store_kv import compile_rope_and_store_kv, rope_and_store_kv
from aserve_kernels.cpu.shared_table import compile_shared_table, continue_shared, remember
from aserve_kernels.cpu.state_space import advance_spaces, compile_advance_spaces
from aserve_kernels.cpu.suffix_match import (
    compile_suffix_match,
    continue_history,
    continue_text,
)
from aserve_kernels.delta_rule import (
    AdvanceRows,
    DeltaRows,
    DeltaStates,
    DeltaTokens,
    advance_rows_ref,
)
from aserve_kernels.lora import LoraStack, add_lora_ref
from aserve_kernels.shared_table import SharedTableOps
from aserve_kernels.suffix_match import SuffixMatch


def compiled_store(dtype: torch.dtype) -> RopeAndStoreKv:
    """Applies QK norm and rope to the heads and stores keys and values, in one kernel. dtype:
    float32 or bfloat16.

    PERF: us of one thread at 1 and 32 tokens in bfloat16. Qwen3-0.6B's heads, with QK norm: 18 and
    91 in torch after a rope kernel, 11 and 73 in one kernel. A small model's heads, with rope only:
    21 and 33 in torch, 9 and 17 in one kernel.
    """
    compile_rope_and_store_kv(dtype)
    return _rope_and_store_kv


def _rope_and_store_kv(
    heads: Tensor,
    rope: RopeInputs | None,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    scales: Scales,
    /,
) -> Tensor:
    if rope is None or pools[0].dtype not in (heads.dtype, torch.bfloat16):
        return rope_then_store_kv(heads, rope, slots, pools, scales)
    norms = rope.norms
    weight, eps = (None, 0.0) if norms is None else (norms.weight, norms.eps)
    return rope_and_store_kv(
        *(heads, slots, pools),
        cos_sin=rope.cos_sin,
        weight=weight,
        eps=eps,
        num_workers=_num_workers(heads),
    )


# PERF: Qwen3-0.6B in bfloat16, us of one thread at 1 and 32 tokens: a norm 10 and 19 in torch, 4
# and 8 here; silu(gate) * up is as fast in torch. A prefill of 2,048 tokens on two threads, ms of
# all layers: norms 190 in torch and 15 here, QK norm with rope and the store 380 and 80, gated
# activations 120 and 60.
FEW_ELEMENTS = 1 << 18  # about 0.1 ms of one thread


def _num_workers(x: Tensor) -> int:
    return 1 if x.numel() <= FEW_ELEMENTS else torch.get_num_threads()


class CompiledNorm:
    """RMS norm, y = x / rms(x) * w, with a float32 copy of its weight for the kernels."""

    __slots__ = ("_eps", "weight")

    def __init__(self, weight: Tensor, /, *, eps: float) -> None:
        self._eps = eps
        self.weight = weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps, num_workers=_num_workers(x))


class CompiledGate:
    """`y = act(gate) * up`, with the contract of `GatedActivation`."""

    __slots__ = ("_in_torch", "activation")

    def __init__(self, activation: str) -> None:
        self.activation = activation
        self._in_torch = GatedActivation(activation)

    def __call__(self, joined: Tensor) -> Tensor:
        if joined.numel() <= FEW_ELEMENTS or not joined.is_contiguous():
            return self._in_torch(joined)
        return gated_mul(joined, self.activation, num_workers=torch.get_num_threads())


def compiled_add_norm(weight: Tensor, /, *, eps: float, scale: float) -> AddNorm:
    return AddNorm(CompiledNorm(weight, eps=eps), scale=scale)


def compiled_elementwise(dtype: torch.dtype) -> Elementwise:
    """dtype: float32 or bfloat16."""
    compile_rms_norm(dtype)
    compile_gated_mul(dtype)
    return Elementwise(norm=CompiledNorm, add_norm=compiled_add_norm, gated=CompiledGate)


def compiled_sample_ops() -> SampleOps:
    compile_draw()
    return SampleOps(draw=_draw)


def _draw(
    logits: Tensor, rows: LogitsRows, tables: RowTables, plan: SamplePlan
) -> tuple[Tensor, Tensor]:
    """Draws in the kernel, except with filters, with float64 logits, and while a dispatch mode
    records torch's operators, which would not see a kernel of numba.

    PERF: 16 rows of 4,096 logits, us of one thread: greedy 46 in torch and 8 here, with noise 480
    and 100.
    """
    is_recorded = _get_current_dispatch_mode() is not None
    if plan.needs_filter or logits.dtype != torch.float32 or is_recorded:
        return draw_tokens(logits, rows, tables, plan)
    params = tables.at(rows.rows, logits.dtype)
    return draw(logits, params.ints("seed"), rows.lens, params.floats("temperature"))


def compiled_suffix_match() -> SuffixMatch:
    compile_suffix_match()
    compile_shared_table()
    return SuffixMatch(continue_history, continue_text, SharedTableOps(continue_shared, remember))


def compiled_advance_rows(dtype: torch.dtype) -> AdvanceRows:
    """dtype: float32 or bfloat16."""
    num_workers = torch.get_num_threads()
    compile_advance_rows(dtype, num_workers)
    compile_advance_spaces(dtype, num_workers)

    def advance(tokens: DeltaTokens, rows: DeltaRows, states: DeltaStates, /) -> Tensor:
        if not fits_blocks(states):
            return advance_rows_ref(tokens, rows, states)
        if tokens.space is not None:
            return advance_spaces(tokens, tokens.space, rows, states, num_workers)
        return advance_rows(tokens, rows, states, num_workers=num_workers)

    return advance


# PERF: from this number of tokens on, dense products over all slots are faster than the kernel.
MANY_TOKENS = 128


def compiled_lora(dtype: torch.dtype) -> LoraOps:
    """dtype: float32 or bfloat16."""
    compile_lora(dtype, torch.get_num_threads())
    return LoraOps(_add_lora, _has_any)


def _add_lora(y: Tensor, x: Tensor, slots: Tensor, stack: LoraStack) -> None:
    add = add_lora_ref if len(x) >= MANY_TOKENS else add_lora
    add(y, x, slots, stack)


def _has_any(slots: Tensor) -> bool:
    return bool(slots.numpy().any())
