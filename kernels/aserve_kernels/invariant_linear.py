"""A batch-invariant linear layer: a token's output has the same bits in a batch of any size.

    y = x W^T + b

WHY: cuBLAS chooses its tiles, and whether to split the sum over `in` (split-K), by the number of
tokens, so a token's sum is rounded differently in different batches. Here the tile sizes and the
order of the sum follow from the shape of the weight alone.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from aserve_kernels.dot import dot_add
from aserve_kernels.tile_order import tile_at

BLOCK_M = 64  # tokens: the least M of Hopper's warpgroup products (wgmma)
# NOTE: not measured. Decode wants a program for every SM, prefill wants wide tiles.
WIDE_FROM = 16 << 10  # outputs from which tiles are wide


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, in], weight [out, in] and bias [out], all float32, bfloat16 or float16, with
    contiguous rows -> [tokens, out]. The accumulation is float32."""
    num_tokens, num_outputs = len(x), len(weight)
    out = x.new_empty((num_tokens, num_outputs))
    if not num_tokens:
        return out
    block_n = 128 if num_outputs >= WIDE_FROM else 32
    is_16_bit = x.dtype.itemsize == 2
    _multiply[(triton.cdiv(num_tokens, BLOCK_M) * triton.cdiv(num_outputs, block_n),)](
        x, weight, bias, out, num_tokens, x.stride(0),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=weight.shape[1],
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=64 if is_16_bit else 32,
        num_warps=4,
        num_stages=4 if is_16_bit else 2,
    )  # fmt: skip
    return out


def invariant_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    float_bias = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), float_bias).to(x.dtype)


# NOTE: one compiled kernel serves every number of tokens; a kernel that Triton specialised for one
# token might sum in another order.
@triton.jit(do_not_specialize=["num_tokens"])
def _multiply(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor | None, out: tl.tensor,
    num_tokens: int, x_stride: int,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One program computes one [BLOCK_M tokens, BLOCK_N outputs] tile."""
    num_blocks: tl.constexpr = (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N
    token_block, output_block = tile_at(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_M), num_blocks)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = output_block * BLOCK_N + tl.arange(0, BLOCK_N)
    has_token = (tokens < num_tokens)[:, None]
    has_output = outputs < NUM_OUTPUTS
    inputs = tl.arange(0, BLOCK_K)
    x_rows = x + tokens.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + outputs.to(tl.int64)[:, None] * NUM_INPUTS
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        columns = (start + inputs)[None, :]
        a = tl.load(x_rows + columns, mask=has_token & (columns < NUM_INPUTS), other=0.0)
        b = tl.load(
            weight_rows + columns, mask=has_output[:, None] & (columns < NUM_INPUTS), other=0.0
        )
        acc = dot_add(acc, a, tl.trans(b))
    if bias is not None:
        acc += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    out_addresses = out + tokens.to(tl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(out_addresses, acc.to(out.dtype.element_ty), mask=has_token & has_output[None, :])
