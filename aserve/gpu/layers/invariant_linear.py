"""Linear layers whose product of a token does not depend on the number of tokens. For GPUs.

It knows no checkpoint.
"""

from __future__ import annotations

from functools import partial

import torch

from aserve.gpu.layers.linear import Linear, LinearOp
from aserve_kernels.invariant_linear import invariant_linear


def prepare_invariant(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """dtype: float32, bfloat16 or float16."""
    bias = None if linear.bias is None else linear.bias.to(device, dtype)
    weight = linear.weight.to(device, dtype).contiguous()
    return partial(invariant_linear, weight=weight, bias=bias)
