"""CUDA's fused operators, as Triton kernels: rope and KV store, RMS norms, gated activations,
sampling, the preparation of a step's inputs, and the relay's gathers and scatters.

The kernels compute in float32, so a float64 model runs in plain torch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import RopeAndStoreKv, Scales, rope_then_store_kv
from aserve.gpu.layers.grouped_linear import (
    ExpertWeights,
    GroupedLinearOp,
    Groups,
    linear_per_expert,
    widened,
)
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare
from aserve.gpu.layers.mlp import Activation
from aserve.gpu.layers.norm import Norm, SumAndNorm
from aserve.gpu.layers.ops import PLAIN, Elementwise
from aserve.gpu.layers.rope import RopeInputs
from aserve.gpu.lora.tables import LoraOps
from aserve.gpu.sampling.ops import SHAPED_OPS, SampleOps
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.future_map import LAST_TOKEN, PLAIN_ROW_OPS, SEQ_LEN, RowOps
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceState, DeviceStep, Resolve, resolve, resolved_batch
from aserve.gpu.transfer.staging import DeviceArrays
from aserve_kernels import penalties
from aserve_kernels.bitmask import apply_bitmask
from aserve_kernels.delta_rule import AdvanceRows, advance_rows_ref
from aserve_kernels.delta_step import advance_rows
from aserve_kernels.few_rows_linear import FEW_ROWS, few_rows_linear
from aserve_kernels.gated_mul import gated_mul
from aserve_kernels.grouped_linear import grouped_linear
from aserve_kernels.invariant_linear import invariant_linear
from aserve_kernels.lora import LoraStack, add_lora_ref
from aserve_kernels.prepare_inputs import PackedInputs, Tables, prepare_inputs
from aserve_kernels.punica import add_lora
from aserve_kernels.relay_rows import gather_rows, scatter_rows
from aserve_kernels.rms_norm import add_rms_norm, rms_norm
from aserve_kernels.rope_and_store_kv import rope_and_store_kv
from aserve_kernels.sample import sample


def triton_store(dtype: torch.dtype) -> RopeAndStoreKv:
    return rope_then_store_kv if dtype == torch.float64 else _rope_and_store_kv


def _rope_and_store_kv(
    heads: Tensor,
    rope: RopeInputs | None,
    slots: Tensor,
    pools: tuple[Tensor, Tensor],
    scales: Scales,
    /,
) -> Tensor:
    if heads.stride()[1:] != (heads.shape[2], 1):
        heads = heads.contiguous()
    if rope is None:
        return rope_and_store_kv(heads, slots, pools, cos_sin=None, scales=scales)
    norms = rope.norms
    weight, eps = (None, 0.0) if norms is None else (norms.weight, norms.eps)
    return rope_and_store_kv(
        heads, slots, pools, cos_sin=rope.cos_sin, weight=weight, eps=eps, scales=scales
    )


KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_elementwise(dtype: torch.dtype) -> Elementwise:
    """Kernels for float32, bfloat16 and float16, plain torch for other dtypes."""
    if dtype not in KERNEL_DTYPES:
        return PLAIN
    return Elementwise(norm=_norm, add_norm=_add_norm, gated=_gated)


def _norm(weight: Tensor, /, *, eps: float) -> Norm:
    return partial(rms_norm, weight=weight, eps=eps)


def _add_norm(weight: Tensor, /, *, eps: float, scale: float) -> SumAndNorm:
    return partial(add_rms_norm, weight=weight, eps=eps, scale=scale)


def _gated(activation: str) -> Activation:
    return partial(gated_mul, activation=activation)


class FewRowsLinear(Linear):
    """A linear layer in which few tokens have a kernel of their own."""

    __slots__ = ()

    def __call__(self, x: Tensor, /) -> Tensor:
        if len(x) > FEW_ROWS:
            return functional.linear(x, self.weight, self.bias)
        x = x if x.stride(1) == 1 else x.contiguous()
        return few_rows_linear(x, self.weight, self.bias)


def prepare_few_rows(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """The `Prepare` of bfloat16 and float16."""
    bias = None if linear.bias is None else linear.bias.to(device, dtype)
    return FewRowsLinear(linear.weight.to(device, dtype).contiguous(), bias)


def prepare_invariant(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """Linear layers with fixed tiles and a fixed order of summation, so that a token's result does
    not depend on the number of tokens. dtype: float32, bfloat16 or float16."""
    bias = None if linear.bias is None else linear.bias.to(device, dtype)
    weight = linear.weight.to(device, dtype).contiguous()
    return partial(invariant_linear, weight=weight, bias=bias)


class GroupedKernel:
    """A `GroupedLinearOp` that reads the bounds on the device."""

    __slots__ = ("_biases", "_weights")

    def __init__(self, weights: Tensor, biases: Tensor | None) -> None:
        self._weights = weights
        self._biases = biases

    def __call__(self, x: Tensor, groups: Groups, /) -> Tensor:
        return grouped_linear(x, self._weights, self._biases, groups.starts, groups.ends)


def prepare_grouped(
    weights: ExpertWeights, biases: Tensor | None, prepare: Prepare, /
) -> GroupedLinearOp:
    """Grouped layers of float32, bfloat16 or float16. Wider dtypes have one layer per expert."""
    if weights.dtype.itemsize > 4:
        return linear_per_expert(weights, biases, prepare)
    return GroupedKernel(widened(weights), biases)


def triton_sample_ops(dtype: torch.dtype) -> SampleOps:
    """Kernels for logits of up to 32 bits, plain torch for float64."""
    if dtype == torch.float64:
        return SHAPED_OPS
    return SampleOps(
        _draw, _penalise, apply_bitmask, filters_by_shape=True, reads_16_bit_logits=True
    )


def _draw(
    logits: Tensor, rows: LogitsRows, tables: RowTables, plan: SamplePlan
) -> tuple[Tensor, Tensor]:
    return sample(
        logits,
        rows.rows,
        rows.lens,
        tables.int_table,
        tables.float_table,
        has_noise=plan.needs_noise,
        has_limits=plan.needs_filter,
    )


def _penalise(
    logits: Tensor,
    indices: Tensor,
    rows: LogitsRows,
    tables: RowTables,
    pools: KvPools,
    max_len: int,
) -> None:
    param_tables = (tables.int_table, tables.float_table)
    history = (pools.page_tables[0], pools.token_pool, pools.page_size)
    penalties.penalise(logits, indices, rows.rows, rows.lens, param_tables, history, max_len)


def triton_resolver(dtype: torch.dtype) -> Resolve:
    """One kernel instead of `resolve`. Float64 models exist to be exact, so they run in torch."""
    return resolve if dtype == torch.float64 else triton_resolve


def triton_resolve(plan: StepPlan, arrays: DeviceArrays, state: DeviceState) -> DeviceStep:
    """Does what `resolve` does in one kernel. A plan with drafts goes to `resolve` itself."""
    if plan.num_drafts.any():
        return resolve(plan, arrays, state)
    ints, relay, pools = arrays.narrow_ints, state.relay, state.pools
    words = PackedInputs(
        rows=ints("rows"),
        kv_lens=ints("kv_lens"),
        query_lens=ints("query_lens"),
        is_bound=ints("is_bound"),
        token_to_row=ints("token_to_row"),
        offsets=ints("offsets"),
        input_ids=ints("input_ids"),
    )
    tables = Tables(
        last_tokens=relay.table(LAST_TOKEN),
        seq_lens=relay.table(SEQ_LEN) if SEQ_LEN in relay else None,
        page_tables=pools.page_tables,
        token_pool=pools.token_pool,
        page_size=pools.page_size,
    )
    made = prepare_inputs(words, tables)
    batch = ForwardBatch.from_slots(
        resolved_batch(plan, arrays, input_ids=made.input_ids, kv_lens=made.kv_lens),
        token_rows=made.token_rows,
        positions=made.positions,
        slots=made.slots,
        lens=made.lens,
        cu_query_lens=made.cu_query_lens,
    )
    return DeviceStep(plan, arrays, batch)


def triton_row_ops(dtype: torch.dtype) -> RowOps:
    """Kernels for the relay's rows. Float64 models exist to be exact, so they run in torch."""
    return PLAIN_ROW_OPS if dtype == torch.float64 else RowOps(gather_rows, _scatter)


def _scatter(
    table: Tensor, rows: Tensor, values: Tensor, stamps: Tensor, iteration: Tensor
) -> None:
    scatter_rows(table, rows, values.contiguous(), stamps, iteration)


def triton_advance_rows(dtype: torch.dtype) -> AdvanceRows:
    return advance_rows_ref if dtype == torch.float64 else advance_rows


# From this number of tokens on, dense products over all slots, on tensor cores, take their place.
MANY_TOKENS = 256


def triton_lora(dtype: torch.dtype, *, is_deterministic: bool) -> LoraOps:
    """In float64 and for many tokens the dense reference runs, except with --deterministic."""
    if dtype == torch.float64:
        return LoraOps()
    return LoraOps(add_lora if is_deterministic else _add_lora)


def _add_lora(y: Tensor, x: Tensor, slots: Tensor, stack: LoraStack) -> None:
    add = add_lora_ref if len(x) >= MANY_TOKENS else add_lora
    add(y, x, slots, stack)
