"""A linear layer whose weights are stored in 8 or 4 bits, and multiplied in the dtype of x.

    y = x W^T + b,  W[o, i] = scales[i // group, o // rows] * code[o, i] + offsets[i // group, o]

A code is an element of fp8 (E4M3), an integer of 8 bits, or one of 4 bits, which is an integer from
-8 to 7 or an element of MXFP4 (E2M1). Each code is exact in bfloat16 and float16, so tensor cores
multiply codes, and a group's sum of products is scaled in float32. The offsets multiply the sums of
the groups of x.

Codes of 4 bits lie in blocks of inputs, two to a byte: byte j of a block has input j in its lower
bits (integers plus 8), and input j + block / 2 in its upper ones. So the lower bits of a tile of
bytes are the weights of one contiguous slice of x, and the upper bits those of another, and no
value changes its place between memory and the product. The block is the largest of 128, 64 and 32
that divides the group.

E4M3 and E2M1 are decoded by their bits, which works on GPUs without such elements as well: moved
into the exponent and mantissa of a float16, they are the value times 2^-8 or 2^-14.

Up to FEW_TOKENS tokens read a weight once, and the sum over `in` is split, so that small weights
occupy the whole device; a second kernel adds the parts in a fixed order (split-K). More tokens are
multiplied in tiles. With `is_invariant` all are, so that a token's bits don't depend on the batch.

Source: split-K and the order of nibbles serve the purposes of those in AutoAWQ's and Marlin's
kernels (https://arxiv.org/abs/2408.11743); the layouts are other ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from aserve_kernels.dot import dot_add
from aserve_kernels.tile_order import tile_at

FEW_TOKENS = 16
# NOTE: the sizes of tiles and the number of programs are not measured.
BLOCK_M = 64
BLOCK_N = 64
NUM_PROGRAMS = 512  # about four for each multiprocessor of a large GPU
BLOCKS = (128, 64, 32)  # inputs of a step, which share a scale
E4M3_SHIFT = tl.constexpr(256.0)
E2M1_SHIFT = tl.constexpr(16384.0)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # elements without a sign
PER_SUM = 1024  # outputs that a program adds the parts of


class CodedMatrix(NamedTuple):
    """A weight W [out, in] of 8 or 4 bits."""

    codes: Tensor  # float8_e4m3fn or int8 [out, in], or uint8 [out, padded in / 2], contiguous
    scales: Tensor  # float32 [groups, out / rows, rounded up], contiguous
    offsets: Tensor | None  # float32 [groups, out], contiguous; `rows` is 1
    num_inputs: int
    group: int  # inputs with one scale, as block_of supports it
    rows: int = 1  # outputs with one scale
    is_e2m1: bool = False  # codes of 4 bits are elements of MXFP4


def block_of(num_inputs: int, group: int) -> int | None:
    """The inputs that a step multiplies; None where the kernel does not support the group."""
    if group >= num_inputs:
        return BLOCKS[0]
    return next((block for block in BLOCKS if group % block == 0), None)


def pack_4_bits(codes: Tensor, block: int) -> Tensor:
    """codes int8 [out, in] from -8 to 7 -> uint8 [out, padded in / 2]."""
    num_blocks: int = triton.cdiv(codes.shape[1], block)
    padded = functional.pad(codes + 8, (0, num_blocks * block - codes.shape[1]))
    low, high = padded.to(torch.uint8).unflatten(1, (num_blocks, 2, -1)).unbind(2)
    packed: Tensor = low + 16 * high
    return packed.flatten(1)


def unpack_4_bits(packed: Tensor, num_inputs: int, block: int) -> Tensor:
    """The inverse of pack_4_bits."""
    halves = packed.unflatten(1, (-1, block // 2))
    values: Tensor = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1).to(torch.int8)
    return values[:, :num_inputs] - 8


def weight_only_linear(
    x: Tensor, weight: CodedMatrix, bias: Tensor | None = None, *, is_invariant: bool = False
) -> Tensor:
    """x [tokens, in] with contiguous rows and bias [out], both float32, bfloat16 or float16
    -> [tokens, out]. The accumulation is float32."""
    num_tokens, num_outputs = len(x), len(weight.codes)
    out = x.new_empty((num_tokens, num_outputs))
    if not num_tokens:
        return out
    block = block_of(weight.num_inputs, weight.group)
    assert block is not None
    is_few = num_tokens <= FEW_TOKENS and not is_invariant
    num_steps, num_tiles = triton.cdiv(weight.num_inputs, block), triton.cdiv(num_outputs, BLOCK_N)
    steps = max(1, triton.cdiv(num_steps * num_tiles, NUM_PROGRAMS)) if is_few else num_steps
    num_splits = triton.cdiv(num_steps, steps)
    parts = x.new_empty((num_splits, *out.shape), dtype=torch.float32) if num_splits > 1 else out
    block_m = FEW_TOKENS if is_few else BLOCK_M
    _multiply_codes[(triton.cdiv(num_tokens, block_m) * num_tiles, num_splits)](
        x, bits_of(weight.codes), weight.scales, weight.offsets, None if num_splits > 1 else bias,
        parts, num_tokens, x.stride(0),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=weight.num_inputs,
        ROW_BYTES=weight.codes.shape[1],
        KIND=kind_of(weight.codes, is_e2m1=weight.is_e2m1),
        GROUP=weight.group,
        ROWS=weight.rows,
        STEPS=steps,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block,
        num_warps=4,
        num_stages=4 if is_few else 3,
    )  # fmt: skip
    if num_splits > 1:
        _add_splits[(num_tokens, triton.cdiv(num_outputs, PER_SUM))](
            parts, bias, out, parts.stride(0),
            NUM_OUTPUTS=num_outputs,
            NUM_SPLITS=num_splits,
            BLOCK=min(PER_SUM, triton.next_power_of_2(num_outputs)),
            num_warps=4,
        )  # fmt: skip
    return out


def weight_only_linear_ref(
    x: Tensor, weight: CodedMatrix, bias: Tensor | None = None, *, is_invariant: bool = False
) -> Tensor:
    float_bias = None if bias is None else bias.float()
    return functional.linear(x.float(), widened_ref(weight), float_bias).to(x.dtype)


def widened_ref(weight: CodedMatrix) -> Tensor:
    """Returns W, float32 [out, in]."""
    codes, num_inputs = weight.codes, weight.num_inputs
    if codes.dtype == torch.uint8:
        block = block_of(num_inputs, weight.group)
        assert block is not None
        codes = unpack_4_bits(codes, num_inputs, block)
    if weight.is_e2m1:
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
        codes = values[codes.int() + 8]
    outputs = torch.arange(len(codes), device=codes.device) // weight.rows
    groups = torch.arange(num_inputs, device=codes.device) // weight.group
    wide = codes.float() * weight.scales[:, outputs][groups].T
    return wide if weight.offsets is None else wide + weight.offsets[groups].T


def kind_of(codes: Tensor, *, is_e2m1: bool) -> str:
    """Returns KIND of the kernels."""
    if is_e2m1:
        return "e2m1"
    kinds = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8", torch.uint8: "int4"}
    return kinds[codes.dtype]


def bits_of(codes: Tensor) -> Tensor:
    """Returns the codes as kernels take them."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


# NOTE: as in invariant_linear.py, one compiled kernel serves every number of tokens.
@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_codes(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, offsets: tl.tensor | None,
    bias: tl.tensor | None, out: tl.tensor, num_tokens: int, x_stride: int,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, ROW_BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One program computes one [BLOCK_M tokens, BLOCK_N outputs] tile of the sum of STEPS steps.
    out [splits, tokens, out]."""
    num_blocks: tl.constexpr = (NUM_OUTPUTS + BLOCK_N - 1) // BLOCK_N
    num_steps: tl.constexpr = (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K
    token_block, output_block = tile_at(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_M), num_blocks)
    split = tl.program_id(1)
    tokens = token_block * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = output_block * BLOCK_N + tl.arange(0, BLOCK_N)
    has_token = (tokens < num_tokens)[:, None]
    has_output = outputs < NUM_OUTPUTS
    x_rows = x + tokens.to(tl.int64)[:, None] * x_stride
    code_rows = codes + outputs.to(tl.int64)[:, None] * ROW_BYTES
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(split * STEPS, tl.minimum((split + 1) * STEPS, num_steps)):
        acc = add_step(
            acc, x_rows, code_rows, scales, offsets, has_token, outputs, step,
            NUM_OUTPUTS=NUM_OUTPUTS, NUM_INPUTS=NUM_INPUTS, KIND=KIND, GROUP=GROUP, ROWS=ROWS,
            BLOCK_K=BLOCK_K,
        )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    rows = split.to(tl.int64) * num_tokens + tokens
    addresses = out + rows[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(addresses, acc.to(out.dtype.element_ty), mask=has_token & has_output[None, :])


@triton.jit
def add_step(
    acc: tl.tensor, x_rows: tl.tensor, code_rows: tl.tensor, scales: tl.tensor,
    offsets: tl.tensor | None, has_row: tl.tensor, outputs: tl.tensor, step: tl.tensor,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Adds the products of BLOCK_K inputs to acc [rows, outputs]. x_rows and has_row [rows, 1],
    code_rows [outputs, 1] and outputs [outputs]; rows begin at these addresses."""
    num_scales: tl.constexpr = (NUM_OUTPUTS + ROWS - 1) // ROWS
    has_pairs: tl.constexpr = KIND == "int4" or KIND == "e2m1"
    width: tl.constexpr = BLOCK_K // 2 if has_pairs else BLOCK_K  # codes in a row of a tile
    dtype: tl.constexpr = x_rows.dtype.element_ty
    has_output = outputs < NUM_OUTPUTS
    columns = tl.arange(0, width)[None, :]
    start = step * BLOCK_K
    at = start + columns
    a = tl.load(x_rows + at, mask=has_row & (at < NUM_INPUTS), other=0.0)
    products = tl.zeros_like(acc)
    group = start // GROUP
    scale = tl.load(scales + group * num_scales + outputs // ROWS, mask=has_output, other=0.0)
    if has_pairs:
        pairs = tl.load(code_rows + step * width + columns, mask=has_output[:, None], other=0)
        at += width
        high = tl.load(x_rows + at, mask=has_row & (at < NUM_INPUTS), other=0.0)
        if KIND == "e2m1":
            lower = decoded_e2m1(pairs & 15).to(dtype)
            upper = decoded_e2m1(pairs >> 4).to(dtype)
            scale *= E2M1_SHIFT
        else:
            lower = ((pairs & 15).to(tl.float32) - 8.0).to(dtype)
            upper = ((pairs >> 4).to(tl.float32) - 8.0).to(dtype)
        products = dot_add(products, a, tl.trans(lower))
        products = dot_add(products, high, tl.trans(upper))
        if offsets is not None:
            sums = tl.sum(a.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)
            offset = tl.load(offsets + group * NUM_OUTPUTS + outputs, mask=has_output, other=0.0)
            acc += sums[:, None] * offset[None, :]
    else:
        bits = tl.load(code_rows + at, mask=has_output[:, None] & (at < NUM_INPUTS), other=0)
        if KIND == "e4m3":
            b = decoded(bits).to(dtype)
            scale *= E4M3_SHIFT
        else:
            b = bits.to(tl.float32).to(dtype)
        products = dot_add(products, a, tl.trans(b))
    return acc + products * scale[None, :]


@triton.jit
def decoded(bits: tl.tensor) -> tl.tensor:
    """bits uint8, of E4M3 -> float16, the values times 2^-8. NaN is not decoded."""
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def decoded_e2m1(bits: tl.tensor) -> tl.tensor:
    """bits uint8 from 0 to 15, of E2M1 -> float16, the values times 2^-14."""
    wide = bits.to(tl.uint16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def _add_splits(
    parts: tl.tensor, bias: tl.tensor | None, out: tl.tensor, split_stride: int,
    NUM_OUTPUTS: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program adds the parts of BLOCK outputs of one token."""
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_output = outputs < NUM_OUTPUTS
    at = tl.program_id(0).to(tl.int64) * NUM_OUTPUTS + outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(NUM_SPLITS):
        total += tl.load(parts + split * split_stride + at, mask=has_output, other=0.0)
    if bias is not None:
        total += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=has_output)
