"""Float conversions that round like the hardware, for Triton's interpreter.

WHY: the interpreter truncates float32 to bfloat16, and carries wrongly into 8-bit floats. GPUs
round to the nearest, ties to even, as torch does.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, _mode: object) -> np.ndarray:
    """The bits of `values` in another float type."""
    bits = torch.from_numpy(np.array(values).view(f"int{8 * values.itemsize}"))
    converted = bits.view(DTYPES[source]).to(DTYPES[target])
    return converted.view(BITS[converted.element_size()]).numpy()
