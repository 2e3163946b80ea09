"""One denoising pass over blocks, after its forward.

With the token x_j that is drawn at each position j, and its probability p_j:

    masked:   x_j fills it if p_j > threshold, or if no masked position of the block has a greater p
    filled:   x_j replaces it if p_j > edit_threshold, unless the prompt has said it

The pass that fills the last position ends the block. With edits, these go on when nothing is masked
any more, until a pass changes nothing, for at most `max_post_edit_steps` passes. If the last pass
has changed anything, the block's keys and values are not those of its final tokens yet, and the
next pass computes them anew, as those of a finished block.

Source: LLaDA2.0 (https://arxiv.org/abs/2512.15745), and low_confidence.py and joint_threshold.py in
SGLang.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.diffusion.blocks import Blocks
from aserve.gpu.diffusion.registry import Denoising
from aserve.gpu.models.base import wide_logits
from aserve.gpu.sampling.draw import draw_tokens
from aserve.gpu.sampling.params import LogitsRows
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.step.plan import LogitsPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens that a pass draws. Tensors are [n, block_len]."""

    tokens: Tensor  # int64
    probs: Tensor  # of the tokens, at the row's temperature, before top-k, top-p and min-p
    is_valid: Tensor  # bool


def draw(
    runner: StepRunner, blocks: Blocks, hidden: Tensor, plan: LogitsPlan, penalty: float
) -> Drawn:
    """hidden [n * block_len, hidden]. Noise is that of a token's position, in every pass, so that
    what is drawn depends on the logits alone."""
    parts = [
        _draw_rows(runner, blocks, part, hidden, plan, penalty)
        for part in _row_slices(blocks, plan)
    ]
    return Drawn(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _row_slices(blocks: Blocks, plan: LogitsPlan) -> Iterator[slice]:
    """Yields the rows in parts, so that few logits are in memory at a time."""
    most = max((part.num for part in plan.slices), default=1)
    num_rows = max(1, most // blocks.block_len)
    for start in range(0, len(blocks.rows), num_rows):
        yield slice(start, start + num_rows)


def _draw_rows(
    runner: StepRunner,
    blocks: Blocks,
    part: slice,
    hidden: Tensor,
    plan: LogitsPlan,
    penalty: float,
) -> tuple[Tensor, Tensor, Tensor]:
    ids, mask_id = blocks.ids[part], blocks.mask_id
    shape, block_len = ids.shape, blocks.block_len
    tokens = slice(part.start * block_len, part.stop * block_len)
    logits = wide_logits(runner.model.logits(hidden[tokens]))
    logits = logits.view(*shape, -1)
    if penalty:
        before = ids[:, :-1, None]
        less = torch.full_like(before, -penalty, dtype=logits.dtype)
        logits[:, 1:] = logits[:, 1:].scatter_add(2, before, less)
    logits[..., mask_id] = -torch.inf
    flat = logits.flatten(0, 1)
    rows = blocks.rows[part, None].expand(shape).reshape(-1)
    positions = LogitsRows(rows, blocks.positions[part].reshape(-1))
    tables = runner.state.tables
    drawn, is_valid = draw_tokens(flat, positions, tables, _sample_plan(plan, len(flat)))
    temperature = tables.at(rows, flat.dtype).floats("temperature")
    scaled = flat / torch.where(temperature > 0, temperature, 1)[:, None]
    probs = scaled.softmax(dim=1).gather(1, drawn[:, None])[:, 0]
    return drawn.view(shape), probs.view(shape), is_valid.view(shape)


def _sample_plan(plan: LogitsPlan, num: int) -> SamplePlan:
    """Returns a plan that has what any of the step's rows needs of noise and filters."""
    return dataclasses.replace(
        plan.slices[0],
        num=num,
        needs_noise=any(part.needs_noise for part in plan.slices),
        needs_filter=any(part.needs_filter for part in plan.slices),
        max_top_k=max(part.max_top_k for part in plan.slices),
    )


def denoise(
    blocks: Blocks, drawn: Drawn, settings: Denoising, *, is_folded: bool
) -> tuple[Blocks, Tensor]:
    """Returns the blocks after the pass, and which of them it has ended, bool [n]. A pass that is
    not folded leaves the blocks behind finished ones as they are (blocks.py)."""
    is_open = blocks.is_open
    is_here = ~blocks.has_finished | is_folded
    odds = drawn.probs.masked_fill(~is_open, -1.0)
    is_sure = odds > settings.threshold
    is_best = blocks.offsets == odds.argmax(dim=1, keepdim=True)
    is_changed = is_filled = is_open & (is_sure | is_best) & is_here[:, None]
    num_edits, may_go_on = blocks.num_edits, torch.zeros_like(is_here)
    if settings.edit_threshold is not None:
        is_editing = ~is_open.any(dim=1)
        num_edits = num_edits + is_editing
        may_edit = ~is_open & ~blocks.is_known & is_here[:, None]
        may_edit &= (num_edits <= settings.max_post_edit_steps)[:, None]
        is_other = drawn.tokens != blocks.ids
        is_changed = is_filled | (may_edit & is_other & (drawn.probs > settings.edit_threshold))
        may_go_on = num_edits < settings.max_post_edit_steps
    is_open = is_open & ~is_filled
    has_changed = is_changed.any(dim=1)
    has_ended = is_here & ~is_open.any(dim=1) & ~(has_changed & may_go_on)
    after = dataclasses.replace(
        blocks,
        ids=torch.where(is_changed, drawn.tokens, blocks.ids),
        is_open=is_open,
        num_edits=num_edits,
        has_finished=has_ended & has_changed,
    )
    return after, has_ended
