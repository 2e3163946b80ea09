"""The parts that drafters share: draws that are coupled with the target's, and the inputs with
which a drafter catches up with the target at the end of a step.

A draft for the place after `lens` tokens is `argmax(z / T + g)`, where z are the drafter's logits
and g is the noise of (seed, lens, token id), exactly as in sampling/draw.py. The target's token at
that place is drawn with the same g, so where both distributions agree the draft is accepted, at any
temperature (Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant
speculative decoding", 2024: P[accept] >= (1 - TV) / (1 + TV)).

Rejection sampling and block verification (rejection.py) need independent noise for the drafts, and
the distributions that they are drawn from.

The inputs of an extend have the step's own rows, tokens and slots, so a drafter extends over all of
them in one forward. The tokens of an accepted path lie right behind their root, as their KV does in
the pools. What stands behind the accepted tokens is arbitrary, and so is the drafter's KV there,
until the next window overwrites it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.models.base import wide_logits
from aserve.gpu.sampling.draw import add_noise
from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve.gpu.spec.base import DraftRows, Verified
from aserve.gpu.spec.rejection import window_seeds, write_probs
from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from aserve.gpu.step.future_map import FutureMap
from aserve.gpu.step.resolve import DeviceStep
from aserve_kernels.draft_chain import DRAFT_PROBS


def draft_scores(
    runner: StepRunner,
    logits: Tensor,
    rows: DraftRows,
    depth: int,
    *,
    token_ids: Tensor | None = None,
) -> Tensor:
    """logits [n * width, vocab], of `width` nodes for each of the rows -> scores of the same shape,
    whose largest element is the draft of this depth (1 for the token after the root).

    `token_ids` int64 [vocab] are the target's ids of a reduced vocabulary.
    """
    return _scores(runner, logits, rows, depth, token_ids=token_ids)[1]


def draw_drafts(
    runner: StepRunner,
    logits: Tensor,
    rows: DraftRows,
    depth: int,
    *,
    token_ids: Tensor | None = None,
) -> Tensor:
    """logits [n, vocab] -> the drafts of one depth, int64 [n], as ids of the target. If their
    distributions are needed, they are written to the relay."""
    scaled, noisy = _scores(runner, logits, rows, depth, token_ids=token_ids)
    if rows.needs_noise and DRAFT_PROBS in runner.relay:
        write_probs(runner.relay, rows.rows, depth, scaled.softmax(dim=1), token_ids)
    best = noisy.argmax(dim=1)
    return best if token_ids is None else token_ids.index_select(0, best)


def _scores(
    runner: StepRunner,
    logits: Tensor,
    rows: DraftRows,
    depth: int,
    *,
    token_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the logits over the temperature, and the same plus noise, [n * width, vocab] each."""
    if not rows.needs_noise:
        return logits, logits
    logits = wide_logits(logits)
    width = len(logits) // len(rows.rows)
    own, roots = (each.repeat_interleave(width) for each in (rows.rows, rows.lens))
    params = runner.state.tables.at(own, logits.dtype)
    if token_ids is None:
        token_ids = torch.arange(logits.shape[1], device=logits.device)
    seeds = params.ints("seed")
    if DRAFT_PROBS in runner.relay:
        seeds = window_seeds(seeds, roots)
    noise = gumbel_noise(seeds, roots + depth, token_ids, logits.dtype)
    return add_noise(logits, noise, params.floats("temperature"))


@dataclass(frozen=True, slots=True)
class ExtendInputs:
    # The step's, without a tree and with positions of one axis; its input ids are the tokens.
    batch: ForwardBatch
    next_ids: Tensor  # int64 [tokens], the token after each
    features: tuple[Tensor, ...]  # [tokens, hidden] each, the target's hidden states
    last: Tensor  # int64 [samples], the place of each row's last accepted token


def extend_inputs(step: DeviceStep, verified: Verified, relay: FutureMap) -> ExtendInputs:
    batch, features = step.batch, verified.features
    if batch.tree_mask is not None:
        depths = torch.arange(verified.paths.shape[1], device=verified.paths.device)
        is_used = depths < verified.counts[:, None]
        starts = verified.starts[:, None]
        indices = (starts + torch.where(is_used, depths, 0)).flatten()
        sources = (starts + torch.where(is_used, verified.paths, 0)).flatten()
        order = torch.arange(batch.num_tokens, device=indices.device)
        order.index_copy_(0, indices, sources)
        features = tuple(values.index_select(0, order) for values in features)
        batch = dataclasses.replace(
            batch.overridden(ForwardOverrides(), is_debug=batch.is_debug),
            input_ids=batch.input_ids.index_select(0, order),
        )
    elif batch.rope_override is not None:
        batch = dataclasses.replace(batch, rope_override=None)
    next_ids = batch.input_ids.roll(-1)
    next_ids.index_copy_(
        0, batch.cu_query_lens[1:] - 1, relay.resolve(step.arrays.ints("next_ids"))
    )
    set_drawn(next_ids, verified.starts, verified)
    return ExtendInputs(batch, next_ids, features, verified.starts + verified.counts - 1)


def set_drawn(next_ids: Tensor, starts: Tensor, verified: Verified) -> None:
    """Writes the drawn tokens behind the accepted ones, which begin at the indices `starts`."""
    depths = torch.arange(verified.tokens.shape[1], device=starts.device)
    is_used = depths < verified.counts[:, None]
    indices = starts[:, None] + torch.where(is_used, depths, 0)
    drawn = torch.where(is_used, verified.tokens, verified.tokens[:, :1])
    next_ids.index_copy_(0, indices.flatten(), drawn.flatten())
