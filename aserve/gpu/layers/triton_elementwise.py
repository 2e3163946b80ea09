"""Norms, residual sums and gated activations by Triton kernels. For GPUs.

It knows no model.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from aserve.gpu.layers.activation import Activation
from aserve.gpu.layers.elementwise import PLAIN, Elementwise
from aserve.gpu.layers.norm import Norm, SumAndNorm
from aserve_kernels.gated_mul import gated_mul
from aserve_kernels.rms_norm import add_rms_norm, rms_norm

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_elementwise(dtype: torch.dtype) -> Elementwise:
    """Kernels for the dtypes that models have on GPUs, torch for others."""
    if dtype not in KERNEL_DTYPES:
        return PLAIN
    return Elementwise(norm=_norm, add_norm=_add_norm, gated=_gated)


def _norm(weight: Tensor, /, *, eps: float) -> Norm:
    return partial(rms_norm, weight=weight, eps=eps)


def _add_norm(weight: Tensor, /, *, eps: float, scale: float) -> SumAndNorm:
    return partial(add_rms_norm, weight=weight, eps=eps, scale=scale)


def _gated(activation: str) -> Activation:
    return partial(gated_mul, activation=activation)
