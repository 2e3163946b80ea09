"""x W^T + b where a token's result does not depend on how many tokens there are: tiles and the
order of sums follow from the shape of the weight alone.

Libraries choose tiles, and whether to split sums, by the number of tokens. It knows no layer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from aserve_kernels.tile_product import add_product

TOKENS = 64  # the fewest for which Hopper has its widest products
SWATH = 8  # tiles of tokens that read the same weights one after the other
# Not measured. Decoding wants a program for every processor, prompts want wide tiles.
WIDE_FROM = 16 << 10  # outputs


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, in], weight [out, in], bias [out], in float32, bfloat16 or float16, the inputs of
    a token and of an output side by side -> [tokens, out]. Sums are in float32."""
    num_tokens, num_outs = len(x), len(weight)
    out = x.new_empty((num_tokens, num_outs))
    if not num_tokens:
        return out
    outs = 128 if num_outs >= WIDE_FROM else 32
    is_half = x.dtype.itemsize == 2
    _multiply[(triton.cdiv(num_tokens, TOKENS) * triton.cdiv(num_outs, outs),)](
        x, weight, bias, out, num_tokens, x.stride(0),
        NUM_OUTS=num_outs,
        NUM_INS=weight.shape[1],
        TOKENS=TOKENS,
        OUTS=outs,
        INS=64 if is_half else 32,
        SWATH=SWATH,
        num_warps=4,
        num_stages=4 if is_half else 2,
    )  # fmt: skip
    return out


def invariant_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), wide).to(x.dtype)


# NOTE: one kernel for every number of tokens; one made for a single token might sum otherwise.
@triton.jit(do_not_specialize=["num_tokens"])
def _multiply(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor | None, out: tl.tensor,
    num_tokens: int, x_stride: int,
    NUM_OUTS: tl.constexpr, NUM_INS: tl.constexpr, TOKENS: tl.constexpr, OUTS: tl.constexpr,
    INS: tl.constexpr, SWATH: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of tokens and outputs."""
    tile = tl.program_id(0)
    num_out_tiles: tl.constexpr = (NUM_OUTS + OUTS - 1) // OUTS
    swath = tile // (SWATH * num_out_tiles)
    swath_size = tl.minimum(tl.cdiv(num_tokens, TOKENS) - swath * SWATH, SWATH)
    place = tile % (SWATH * num_out_tiles)
    tokens = (swath * SWATH + place % swath_size) * TOKENS + tl.arange(0, TOKENS)
    outs = place // swath_size * OUTS + tl.arange(0, OUTS)
    has_token = (tokens < num_tokens)[:, None]
    has_out = outs < NUM_OUTS
    ins = tl.arange(0, INS)
    x_lines = x + tokens.to(tl.int64)[:, None] * x_stride
    weight_lines = weight + outs.to(tl.int64)[:, None] * NUM_INS
    sums = tl.zeros((TOKENS, OUTS), tl.float32)
    for first in range(0, NUM_INS, INS):
        at = (first + ins)[None, :]
        a = tl.load(x_lines + at, mask=has_token & (at < NUM_INS), other=0.0)
        b = tl.load(weight_lines + at, mask=has_out[:, None] & (at < NUM_INS), other=0.0)
        sums = add_product(sums, a, tl.trans(b))
    if bias is not None:
        sums += tl.load(bias + outs, mask=has_out, other=0.0).to(tl.float32)[None, :]
    lines = out + tokens.to(tl.int64)[:, None] * NUM_OUTS + outs[None, :]
    tl.store(lines, sums.to(out.dtype.element_ty), mask=has_token & has_out[None, :])
