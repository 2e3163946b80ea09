"""Prints the table of docs/models.md with the errors of products whose weights have 8 and 4 bits.

`python -m tools.rounding_error`: random weights are rounded as `--quantization` does, and inputs as
the processor's kernel does. An error is that of the product, relative to the size of the product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.weights.quantized import rounded
from aserve_kernels.cpu.quant_codes import pack_quantized
from aserve_kernels.cpu.quant_linear import quant_linear_ref

NUM_ROWS, NUM_IN, NUM_OUT = 64, 2048, 512


def normal(generator: torch.Generator, *, share: float = 0.0, factor: float = 1.0) -> Tensor:
    """Rows of inputs, of which a share of the columns is larger by a factor."""
    is_large = torch.rand(NUM_IN, generator=generator) < share
    rows = torch.randn((NUM_ROWS, NUM_IN), generator=generator)
    rows[:, is_large] *= factor
    return rows


def gated(generator: torch.Generator) -> Tensor:
    """What a gated MLP multiplies by its down projection."""
    gate, up = torch.randn((2, NUM_ROWS, NUM_IN), generator=generator)
    product: Tensor = functional.silu(2 * gate) * up
    return product


INPUTS: Mapping[str, Callable[[torch.Generator], Tensor]] = {
    "normally distributed": normal,
    "1 % of them 8 times as large": partial(normal, share=0.01, factor=8),
    "0.5 % of them 50 times as large": partial(normal, share=0.005, factor=50),
    "silu(a) b, the input of a down projection": gated,
}


def errors(x: Tensor, weight: Tensor) -> Iterator[float]:
    """Yields those of bfloat16, and of 8 and 4 bits with inputs as they are and rounded."""
    exact = x @ weight.t()
    products = [x.bfloat16().float() @ weight.bfloat16().float().t()]
    for bits in (8, 4):
        coded = rounded(weight, bits)
        packed = pack_quantized(coded.codes, coded.scales, coded.offsets, None, bits=bits)
        products += [quant_linear_ref(x, packed, is_rounded=each) for each in (False, True)]
    for product in products:
        yield float((product - exact).norm() / exact.norm())


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((NUM_OUT, NUM_IN), generator=generator)
    lines = ["| inputs | bfloat16 | 8 bits, inputs as they are | rounded | 4 bits | rounded |"]
    lines.append("|---" * 6 + "|")
    for name, draw in INPUTS.items():
        cells = [f"{error:.2%}" for error in errors(draw(generator), weight)]
        lines.append(f"| {' | '.join([name, *cells])} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
