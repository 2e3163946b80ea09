"""LoRA for a batch whose tokens have different adapters, as in Punica and S-LoRA.

Each token t has an adapter slot; its linear layer becomes y = W x + B A x:

    h[t, p, r] = sum_i x[t, i] * a[slots[t], p, r, i]                         (shrink)
    y[t, o]   += sum_r h[t, part_of[o], r] * b[slots[t], r, o]                (expand)

A linear layer may join several layers of the checkpoint, as q, k and v. Each of them is a part with
an A of its own, and the columns of B are joined like those of y.

Sources: https://arxiv.org/abs/2310.18547, https://arxiv.org/abs/2311.03285
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64s: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoraStack:
    """The adapters of one linear layer, by slot. Slot 0 is no adapter. B contains the adapter's
    scale, and a rank below the largest one is filled up with zeros."""

    a: Tensor  # [slots, parts, rank, in]
    b: Tensor  # [slots, rank, out]
    ranks: Int64s  # [slots, parts] on the host: 0 where an adapter has nothing for a part
    part_of: Tensor  # int32 [out]
    bounds: Int64s  # [parts + 1] on the host: part p has outputs bounds[p] to bounds[p + 1]


def add_lora_ref(y: Tensor, x: Tensor, slots: Tensor, stack: LoraStack) -> None:
    """Adds to y [tokens, out] in place. x [tokens, in], slots int64 [tokens].

    These are dense products over all slots, of which each token keeps its own slot's. They need
    more arithmetic, but are fast for many tokens.
    """
    num_slots, num_parts, rank, num_in = stack.a.shape
    h = (x @ stack.a.view(-1, num_in).t()).view(len(x), num_slots, num_parts, rank)
    is_own = slots[:, None] == torch.arange(num_slots, device=slots.device)
    h = torch.where(is_own[:, :, None, None], h, 0)
    for part in range(num_parts):
        columns = slice(int(stack.bounds[part]), int(stack.bounds[part + 1]))
        weight = stack.b[:, :, columns].flatten(0, 1)
        y[:, columns] += h[:, :, part].flatten(1) @ weight
