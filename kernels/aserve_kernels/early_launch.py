"""Programmatic dependent launch: a kernel's blocks are placed while the kernel before it ends.

A kernel launched with `launch_pdl` may begin before the previous kernel of its stream has ended. So
it calls `wait_for_inputs` before its first access to memory, and waits there until all that the
previous kernel wrote can be read. What is saved is the time between two kernels of a short step:
the launch, and the placement of blocks. In the same place it allows the next kernel to begin early.
If that one is not launched with `launch_pdl`, it waits as ever.

NOTE: every kernel with `launch_pdl` waits, even one that reads nothing of the previous kernel. So a
kernel that has ended means that all before it have ended, too.

Source: "Programmatic Dependent Launch and Synchronization" in CUDA's programming guide,
https://docs.nvidia.com/cuda/cuda-c-programming-guide/
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_CAPABILITY = (9, 0)  # Hopper


def launches_early(x: Tensor) -> bool:
    """Whether kernels on the device of x are launched with `launch_pdl`."""
    return is_supported(x.device)


@functools.cache
def is_supported(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


@triton.jit
def wait_for_inputs(IS_EARLY: tl.constexpr) -> None:
    """Called before a kernel's first access to memory."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
