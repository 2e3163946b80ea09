"""Samples the tokens of a step whose logits are computed slice by slice, to bound their memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aserve.gpu.sampling.params import LogitsRows
from aserve.gpu.sampling.sampler import Sampled, Sampler, Staged
from aserve.gpu.step.plan import LogitsPlan
from aserve.gpu.transfer.staging import DeviceArrays


def sample_slices(
    sampler: Sampler,
    plan: LogitsPlan,
    arrays: DeviceArrays,
    rows: LogitsRows,
    logits_of: Callable[[slice], Tensor],
) -> Sampled:
    """`logits_of` computes one slice's logits; only these are in memory at a time."""
    parts: list[Sampled] = []
    start = 0
    for number, slice_plan in enumerate(plan.slices):
        part = slice(start, start + slice_plan.num)
        staged = Staged(slice_plan, arrays, f"slice{number}")
        parts.append(sampler.sample(logits_of(part), rows.at(part), staged))
        start = part.stop
    return _joined(parts, rows.rows)


def _joined(parts: list[Sampled], like: Tensor) -> Sampled:
    """Concatenates slices. `num_top` becomes that of the slice with the most alternatives."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        nothing, empty = like.new_zeros(0), torch.zeros(0, device=like.device)
        table = nothing.view(0, 0)
        return Sampled(nothing, nothing.to(torch.bool), empty, table, table.float())
    width = max(part.top_ids.shape[1] for part in parts)
    return Sampled(
        tokens=torch.cat([part.tokens for part in parts]),
        is_valid=torch.cat([part.is_valid for part in parts]),
        chosen=torch.cat([part.chosen for part in parts]),
        top_ids=torch.cat([_widen(part.top_ids, width) for part in parts]),
        top_logprobs=torch.cat([_widen(part.top_logprobs, width) for part in parts]),
    )


def _widen(table: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, width - table.shape[1]))
