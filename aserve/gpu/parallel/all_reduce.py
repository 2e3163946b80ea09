"""The ways to sum a tensor over ranks on devices, and which tensors each of them takes.

    gathered    all-gather, then sum_r x_r in the order of ranks: the reference. It does not depend
                on the number of tokens, and is what --deterministic uses
    one-shot    each rank reads the parts of all ranks from their memory and adds them up
    two-shot    each rank adds up 1/n of the elements, and all read these sums
    the group   NCCL's choice, for all other tensors

One-shot takes one meeting of the ranks and reads n parts, so it is for short messages, and two-shot
takes two meetings and reads 2 parts. Both are kernels of torch (torch.ops.symm_mem) that need
symmetric memory; each adds the parts in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aserve.messages.base import KIB

BUFFER_BYTES = 8192 * KIB
# Bytes of the longest message of the one-shot kernel by the number of ranks. Source: the
# all-reduce kernels of vLLM (csrc/custom_all_reduce.cuh), which have the same two shapes.
ONE_SHOT_BYTES: Mapping[int, int] = {2: BUFFER_BYTES, 4: 512 * KIB, 8: 256 * KIB}
TWO_SHOT_RANKS = (2, 4, 8)  # for which torch has compiled its kernel
ALIGNMENT = 16  # bytes that the kernels load at once
DTYPES = (torch.float32, torch.bfloat16)  # those of the kernels


class AllReduce(Protocol):
    """One way to sum."""

    @property
    def name(self) -> str: ...

    def takes(self, x: Tensor) -> bool:
        """Returns whether this way sums x, by its size and dtype alone: all ranks agree."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks. x is contiguous and not empty, and may be overwritten."""


@dataclass(frozen=True, slots=True)
class GatheredSum:
    """The sum of gathered parts, in the order of ranks."""

    gather: Callable[[Tensor], Tensor]  # x -> [ranks, *x.shape]
    name: str = "gathered"

    def takes(self, x: Tensor) -> bool:
        return True

    def __call__(self, x: Tensor) -> Tensor:
        parts = self.gather(x)
        total = parts[0] + parts[1] if len(parts) > 1 else parts[0]
        for part in parts[2:]:
            total += part
        return total


@dataclass(frozen=True, slots=True)
class SymmetricSum:
    """One of torch's kernels over symmetric memory. `run(buffer, x)` sums x through a buffer of the
    same shape."""

    name: str
    run: Callable[[Tensor, Tensor], Tensor]
    buffer: Tensor  # uint8 [BUFFER_BYTES], which all ranks read
    max_bytes: int

    def takes(self, x: Tensor) -> bool:
        return x.dtype in DTYPES and x.nbytes <= self.max_bytes and x.nbytes % ALIGNMENT == 0

    def __call__(self, x: Tensor) -> Tensor:
        """NOTE: the kernels end when all ranks have read, so the next sum may use the buffer."""
        return self.run(self.buffer[: x.nbytes].view(x.dtype).view(x.shape), x)


def symmetric_sums(buffer: Tensor, group: str, num_ranks: int) -> tuple[SymmetricSum, ...]:
    """Returns the ways through a buffer of symmetric memory, the one for the shortest messages
    first."""

    def one_shot(own: Tensor, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(own, x, "sum", group)
        return found

    def two_shot(own: Tensor, x: Tensor) -> Tensor:
        own.copy_(x)
        found: Tensor = torch.ops.symm_mem.two_shot_all_reduce_out(own, "sum", group, x)
        return found

    fits = [size for ranks, size in ONE_SHOT_BYTES.items() if num_ranks <= ranks]
    two_shot_bytes = BUFFER_BYTES if num_ranks in TWO_SHOT_RANKS else 0
    rows = ((one_shot, max(fits, default=0)), (two_shot, two_shot_bytes))
    return tuple(
        SymmetricSum(run.__name__.replace("_", "-"), run, buffer, limit)
        for run, limit in rows
        if limit
    )
