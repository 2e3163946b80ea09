"""The coupled draw in torch: as much of it as the rows of a plan need.

It knows no history and no mask: whatever changes logits came before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.sampling.top_k_top_p import Limits, choose, set_limits


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens int64 [n]; is_sound bool [n], False where no token can be drawn: a logit is NaN or
    plus infinity, or none is allowed. The token of such a row is any."""

    tokens: Tensor
    is_valid: Tensor


Choose = Callable[[Tensor, Tensor, Tensor, Limits], Tensor]


def draw_tokens(
    logits: Tensor,
    rows: LogitsRows,
    tables: RowTables,
    plan: SamplePlan,
    *,
    by: Choose = choose,
) -> Drawn:
    """logits [n, vocab], which stay. `by` is how rows with a filter choose."""
    # The maximum is NaN if one logit is, and -inf if none is allowed.
    return Drawn(_tokens(logits, rows, tables, plan, by=by), logits.amax(dim=1).isfinite())


def _tokens(
    logits: Tensor, rows: LogitsRows, tables: RowTables, plan: SamplePlan, *, by: Choose
) -> Tensor:
    if not plan.needs_noise:
        return logits.argmax(dim=1)
    params = tables.at(rows.rows, logits.dtype)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(params.ints("seed"), rows.lens, token_ids, logits.dtype)
    scaled, noisy = add_noise(logits, noise, params.floats("temperature"))
    if not plan.needs_filter:
        return noisy.argmax(dim=1)
    probs = scaled.softmax(dim=1)
    limits = set_limits(
        probs,
        top_k=params.ints("top_k"),
        top_p=params.floats("top_p"),
        min_p=params.floats("min_p"),
        max_top_k=plan.max_top_k,
    )
    return by(scaled, noisy, probs, limits)


def add_noise(scores: Tensor, noise: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """scores, noise [n, vocab], temperature [n] -> scaled and noisy scores. Temperature 0 is
    greedy: no noise.
    """
    is_drawn = (temperature > 0)[:, None]
    scaled = scores / torch.where(is_drawn, temperature[:, None], 1)
    return scaled, torch.where(is_drawn, scaled + noise, scaled)
