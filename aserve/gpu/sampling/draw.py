"""Draws tokens from processed logits in plain torch. This is the reference of the kernels.

With z = logits / temperature, seed-derived Gumbel noise g, and the set S of tokens that top-k,
top-p and min-p leave (sampling/top_k_top_p.py):

    token = argmax of z + g over S            (temperature > 0: a sample of softmax(z) within S)
    token = argmax of the logits              (temperature = 0: greedy)

A plan says whether any row needs noise or a filter; a step in which none does skips that work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.sampling.top_k_top_p import Limits, choose, set_limits

Choose = Callable[[Tensor, Tensor, Tensor, Limits], Tensor]


def draw_tokens(
    logits: Tensor,
    rows: LogitsRows,
    tables: RowTables,
    plan: SamplePlan,
    *,
    by: Choose = choose,
) -> tuple[Tensor, Tensor]:
    """logits [n, vocab], not modified -> tokens int64 [n], is_valid bool [n].

    A row is invalid, and its token arbitrary, where a logit is NaN or plus infinity or where no
    token is allowed. `by` chooses the tokens of rows with a filter.
    """
    # The maximum is NaN if one logit is NaN, and -inf if no token is allowed.
    return _tokens(logits, rows, tables, plan, by=by), logits.amax(dim=1).isfinite()


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
    """scores, noise [n, vocab], temperature [n] -> scores / temperature, and the same plus noise.
    A row of temperature 0 is neither divided nor given noise."""
    is_drawn = (temperature > 0)[:, None]
    scaled = scores / torch.where(is_drawn, temperature[:, None], 1)
    return scaled, torch.where(is_drawn, scaled + noise, scaled)
