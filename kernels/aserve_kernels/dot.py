"""`tl.dot` with float32 accumulation, for every kernel that multiplies tiles.

A bug of Triton's interpreter is worked around here, in one place.
"""

from __future__ import annotations

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot_add(acc: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """acc + a b: a [m, k], b [k, n], acc [m, n] float32. Float32 operands are not cut to TF32."""
    if IS_INTERPRETED:
        # WHY: the interpreter multiplies bfloat16 wrongly. In float32 the products are the same.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
