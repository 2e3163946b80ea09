"""The product of two tiles for all kernels, so that the interpreter's weakness has one place."""

from __future__ import annotations

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def add_product(sums: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """sums [m, n] float32 + a [m, k] b [k, n], in float32. Tiles of float32 are not rounded."""
    if IS_INTERPRETED:
        # It multiplies bfloat16 wrongly; the same numbers in float32 have the same products.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")
