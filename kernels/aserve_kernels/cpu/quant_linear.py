"""A linear layer whose weights have 8 or 4 bits, in groups: y = x W^T + b.

    W[o, i] = scales[o, g] * code[o, i] + offsets[o, g],  g = i // group

Decode reads every weight once, so memory bandwidth is the limit, and such weights take half or a
quarter of the bytes of bfloat16. Inputs are rounded to integers (quant_rows.py). Threads share the
outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import prange, types
from numba.core.types import containers
from numba.np.numpy_support import from_dtype
from torch import Tensor
from torch.nn import functional

from aserve_kernels.cpu.bf16 import Floats, as_array, numba_type
from aserve_kernels.cpu.callback import Callback
from aserve_kernels.cpu.memory import (
    FLOAT32_LIKE,
    INT8_LIKE,
    INT32_LIKE,
    UINT8_LIKE,
    UINT16_LIKE,
    UINT32_LIKE,
    array_at,
)
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead
from aserve_kernels.cpu.product import LIKE, RECORD_LIKE, compile_product
from aserve_kernels.cpu.quant_codes import (
    CODES_PER_WORD,
    E2M1,
    INT4,
    INT8,
    CodeKind,
    QuantWeight,
    dequantized,
)
from aserve_kernels.cpu.quant_dots import multiply_by_dots
from aserve_kernels.cpu.quant_rows import INTEGERS_LIKE, LEAST
from aserve_kernels.cpu.team import worker_of
from aserve_kernels.cpu.tiles import OUTPUTS

# Arrays that stand for the types of codes and of factors.
ARRAYS_LIKE: Mapping[CodeKind, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {
    INT8: (INT8_LIKE, UINT16_LIKE),
    INT4: (INT32_LIKE, UINT16_LIKE),
    E2M1: (UINT32_LIKE, UINT8_LIKE),
}


def quant_linear(x: Tensor, weight: QuantWeight, *, num_workers: int = 1) -> Tensor:
    """x [tokens, in] float32 or bfloat16 on the CPU -> [tokens, out] like x."""
    padding = weight.group * weight.num_groups - weight.num_in
    inputs = functional.pad(x, (0, padding)) if padding else x.contiguous()
    out = torch.empty((len(x), len(weight.bias)), dtype=x.dtype)
    product = _multiply_alone if num_workers == 1 else _multiply
    product(as_array(inputs), weight, as_array(out), num_workers)
    return out


def quant_linear_ref(x: Tensor, weight: QuantWeight, *, is_rounded: bool = True) -> Tensor:
    """`is_rounded`: with inputs as the kernel rounds them, else as they are."""
    inputs = rounded_inputs(x.float(), weight) if is_rounded else x.float()
    product = inputs @ dequantized(weight).t() + torch.from_numpy(weight.bias)
    return product.to(x.dtype)


def rounded_inputs(x: Tensor, weight: QuantWeight) -> Tensor:
    """x float32 [tokens, in] -> the same, each span rounded to multiples of its step."""
    span, size = min(weight.group, weight.kind.span), weight.group * weight.num_groups
    spans_of_group = -(-weight.group // span)
    groups = functional.pad(x, (0, size - x.shape[1])).unflatten(1, (-1, weight.group))
    padded = functional.pad(groups, (0, spans_of_group * span - weight.group))
    spans = padded.unflatten(2, (spans_of_group, span))
    largest = spans.abs().amax(dim=3, keepdim=True)
    largest_integer = torch.tensor(float(np.iinfo(INTEGERS_LIKE[weight.kind].dtype).max))
    factor = torch.where(largest < LEAST, 0, largest_integer / largest)
    integers = (spans.double() * factor.double()).round().float()  # rounded once, as an FMA does
    values = (integers * (largest / largest_integer)).flatten(2)[:, :, : weight.group]
    rounded: Tensor = values.flatten(1)[:, : x.shape[1]]
    return rounded


def compile_quant_linear(dtype: torch.dtype, num_workers: int = 1, *, kind: CodeKind) -> None:
    """Compiles for this dtype, and either for one worker or for several."""
    floats = numba_type(dtype)
    rows, flat = types.Array(floats, 2, "C"), types.Array(types.float32, 1, "C")
    codes, factors = (types.Array(from_dtype(like.dtype), 1, "C") for like in ARRAYS_LIKE[kind])
    product = _multiply_alone if num_workers == 1 else _multiply
    fields = (codes, factors, flat, types.int64, types.int64, types.int64, types.float32)
    weight = containers.NamedTuple(fields, QuantWeight)
    compile_ahead(product, rows, weight, rows, types.int64)
    codes_product(dtype, kind)


@cache
def codes_product(dtype: torch.dtype, kind: CodeKind) -> Callback:
    """Returns the product with a weight whose inputs are whole groups, and inputs of this dtype."""
    like, (codes_like, factors_like) = LIKE[dtype], ARRAYS_LIKE[kind]
    per_word = 1 if kind.bits == 8 else CODES_PER_WORD

    def multiply_coded(
        record: int, x: int, num_tokens: int, out: int, worker: int, num_workers: int
    ) -> None:
        layer = array_at(record, (1,), RECORD_LIKE)[0]
        num_in, num_out = layer["num_in"], layer["num_out"]
        num_codes = -(-num_out // OUTPUTS) * OUTPUTS * num_in
        weight = QuantWeight(
            array_at(layer["weight"], (num_codes // per_word,), codes_like),
            array_at(
                layer["factors"], (num_codes // layer["group"] * layer["per_group"],), factors_like
            ),
            array_at(layer["bias"], (num_out,), FLOAT32_LIKE),
            num_in,
            layer["group"],
            layer["per_group"],
            np.float32(layer["unit"]),
        )
        inputs = array_at(x, (num_tokens, num_in), like)
        wide = array_at(out, (num_tokens, num_out), FLOAT32_LIKE)
        multiply_by_dots(inputs, weight, wide, worker, num_workers)

    return compile_product(multiply_coded)


@cached_njit(parallel=True, nogil=True)
def _multiply(x: Floats, weight: QuantWeight, out: Floats, num_workers: int) -> None:
    for index in prange(num_workers):
        multiply_by_dots(x, weight, out, worker_of(index), num_workers)


@cached_njit(nogil=True)
def _multiply_alone(x: Floats, weight: QuantWeight, out: Floats, num_workers: int) -> None:
    for worker in range(num_workers):
        multiply_by_dots(x, weight, out, worker, num_workers)
