"""Rejection sampling and block verification of drafts that were drawn at random.

Both need the distribution q from which each draft was drawn, and give tokens of the target's
distribution p, but other tokens than plain decoding does. `Verification` keeps what they need in
the relay, and `VerifyingDraw` takes the place of the sampler's draw.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.models.base import wide_logits
from aserve.gpu.sampling.gumbel import GAMMA, gumbel_noise
from aserve.gpu.sampling.ops import Draw, SampleOps
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.sampling.top_k_top_p import keep_probs, set_limits
from aserve.gpu.spec.registry import BLOCK, COUPLED
from aserve.gpu.spec.request import LoadedDrafter, SpecOptions
from aserve.gpu.step.future_map import FutureMap, RelayField
from aserve.gpu.step.resolve import DRAFTS, DeviceStep
from aserve_kernels.draft_chain import DRAFT_PROBS

# Theory of operation
#
# A window has the root, node 0, and the drafts x_1 .. x_K, nodes 1 to K. Let p_i and q_i be the
# distributions of the token after node i: p_i after penalties, bans, masks, temperature and
# filters, and q_i the one from which the drafter drew x_{i+1}. As in the coupled verification, a
# token is chosen for every node, and drafts are accepted up to the first that differs from the
# token of the node before it (verify.py). So only the choice is different, and logprobs, stops and
# grammars need nothing new:
#
#   token of node i = x_{i+1}, where the draft is accepted
#                     a draw from max(r_i p_i - q_i, 0), the residual, where it is rejected
#                     a draw from p_i, where there is no draft
#
#   rejection   r_i = 1, and x_{i+1} is accepted if u_i q_i(x_{i+1}) < p_i(x_{i+1})
#               (Leviathan, Kalman and Matias, 2023)
#   block       r_0 = 1, r_{i+1} = min(1, r_i p_i(x_{i+1}) / q_i(x_{i+1})), and all drafts up to the
#               last node i with u_i < h_i are accepted, where h_K = r_K, and
#               h_i = s_i / (s_i + 1 - r_i) with s_i the mass of the residual at i
#               (Sun et al., "Block Verification Accelerates Speculative Decoding", 2024)
#
# A rejected draft never equals the token of its node. A residual is positive at x_{i+1} only if
# r_i p_i(x_{i+1}) > q_i(x_{i+1}). Then rejection sampling accepts x_{i+1}, and in a block r_{i+1}
# is 1, so that h_{i+1} is 1, too.
#
# A draft without a distribution (q_i(x_{i+1}) = 0: a prediction of the client) was proposed with
# certainty. To accept it with probability p_i(x_{i+1}) is to draw from p_i and to compare, so its
# node has the token of plain decoding. So do all nodes of greedy rows.
#
# Noise. Draws from residuals and from p have the noise of plain decoding, a function of (seed,
# position, token id), which serves one emitted token. Drafts and the coins u have the noise of
# (seed, root, position, token id). It is independent of the former, and new in each window. Block
# verification needs that: it has looked at all drafts and coins of a window when it rejects some of
# them, so these must not come again when the next window drafts for the same positions.
#
# A token depends on where its window begins and ends. So that a seeded request repeats exactly, its
# windows must not depend on the load: `DecodeCaps.whole_windows`.

WINDOW = "window"  # [2], the position of the root and the number of drafts of a row's last window
COIN = -1  # the token id of a coin's noise
# A weight with which no token is drawn beside those of a residual. PERF: on a CPU the logarithms of
# 80 x 4,096 weights take 19 ms where half of them are zeros, and 0.6 ms without zeros (one thread).
NEVER = 1e-37


@dataclass(frozen=True, slots=True)
class Verification:
    """Rejection sampling for a drafter of chains with `max_drafts` drafts."""

    vocab_size: int
    max_drafts: int
    is_block: bool

    @property
    def fields(self) -> tuple[RelayField, ...]:
        """NOTE: one probability for each draft and token of the vocabulary, in each row."""
        return (
            RelayField(DRAFT_PROBS, (self.max_drafts, self.vocab_size), torch.float32),
            RelayField(WINDOW, (2,), torch.int64),
        )

    def sample_ops(self, ops: SampleOps, relay: FutureMap) -> SampleOps:
        return dataclasses.replace(ops, draw=VerifyingDraw(ops.draw, relay, self))

    def write_windows(self, step: DeviceStep, relay: FutureMap) -> None:
        """Says where the windows of the step's rows are, for the draws of the step."""
        num_drafts = step.arrays.ints("num_drafts")
        roots = step.batch.lens - num_drafts - 1
        relay.write(WINDOW, step.batch.rows, torch.stack((roots, num_drafts), dim=1))


def verification_for(
    options: SpecOptions, loaded: LoadedDrafter, *, vocab_size: int
) -> Verification | None:
    """NOTE: a drafter without a model leaves nothing to chance, so coupled verification is the
    same as all others."""
    if loaded.model is None:
        return None
    return verification_of(
        options.verification,
        vocab_size=vocab_size,
        max_drafts=loaded.drafter.max_drafts,
        is_tree=loaded.drafter.tree is not None,
    )


def verification_of(
    method: str, *, vocab_size: int, max_drafts: int, is_tree: bool
) -> Verification | None:
    """Returns None for coupled verification, which needs nothing of this file."""
    if method == COUPLED:
        return None
    if is_tree:
        raise ConfigError(
            f"--speculative-verification {method} verifies chains: which drafts a tree keeps "
            "depends on what was drawn, so they have no distribution of their own; leave "
            "--speculative-topk out, or take coupled",
            param="speculative_verification",
        )
    return Verification(vocab_size, max_drafts, is_block=method == BLOCK)


def window_seeds(seeds: Tensor, roots: Tensor) -> Tensor:
    """seeds, roots int64 [n] -> the seeds of the windows, int64 [n].

    The first step of the noise is an output of the seed's generator: its first one in plain
    decoding, and here the one of number root + 1 (gumbel.py).
    """
    return seeds + (roots + 1) * GAMMA


def write_probs(
    relay: FutureMap, rows: Tensor, depth: int, probs: Tensor, token_ids: Tensor | None
) -> None:
    """Keeps the distribution of the drafts of one depth, from 1 on. probs [n, draft vocab];
    `token_ids` int64 [draft vocab] are the target's ids of a reduced vocabulary."""
    table = relay.table(DRAFT_PROBS)
    probs = probs.to(table.dtype)
    if token_ids is not None:
        reduced = probs
        probs = reduced.new_zeros(len(rows), table.shape[2])
        probs.index_copy_(1, token_ids, reduced)
    table.select(1, depth - 1).index_copy_(0, rows, probs)


def forget_probs(relay: FutureMap, rows: Tensor, is_certain: Tensor) -> None:
    """Marks all drafts of rows as proposed with certainty. rows int64 [n], is_certain bool [n]."""
    probs = relay.read(DRAFT_PROBS, rows)
    relay.write(DRAFT_PROBS, rows, probs.masked_fill(is_certain[:, None, None], 0))


@dataclass(frozen=True, slots=True)
class _Nodes:
    """n logits rows as nodes of windows. The windows are whole, and follow each other."""

    depths: Tensor  # int64 [n], 0: the root
    has_next: Tensor  # bool [n], whether a draft comes after the node
    drafts: Tensor  # int64 [n], that draft, else arbitrary
    is_random: Tensor  # bool [n], whether that draft was drawn at random
    coins: Tensor  # float64 [n], above 0 and below 1
    draft_p: Tensor  # [n], p of the draft
    draft_q: Tensor  # [n], q of the draft
    p: Tensor  # [n, vocab], zeros where no token can be drawn
    q: Tensor  # [n, vocab]


# Whether the draft after each node is accepted, bool [n], and the residuals, [n, vocab].
_Decided: TypeAlias = tuple[Tensor, Tensor]


class VerifyingDraw:
    """A `Draw` that accepts drafts. It reads the step's drafts and windows in the relay."""

    __slots__ = ("_draw", "_relay", "_verification")

    def __init__(self, draw: Draw, relay: FutureMap, verification: Verification) -> None:
        self._draw = draw
        self._relay = relay
        self._verification = verification

    def __call__(
        self, logits: Tensor, rows: LogitsRows, tables: RowTables, plan: SamplePlan
    ) -> tuple[Tensor, Tensor]:
        tokens, is_valid = self._draw(logits, rows, tables, plan)
        if not plan.needs_noise:
            return tokens, is_valid
        logits = wide_logits(logits)
        params = tables.at(rows.rows, logits.dtype)
        is_greedy = params.floats("temperature") == 0
        temperature = params.floats("temperature").masked_fill(is_greedy, 1)[:, None]
        scaled = logits / temperature
        p = scaled.softmax(dim=1)
        if plan.needs_filter:
            limits = set_limits(
                p,
                top_k=params.ints("top_k"),
                top_p=params.floats("top_p"),
                min_p=params.floats("min_p"),
                max_top_k=plan.max_top_k,
            )
            p = keep_probs(scaled, p, limits)
        nodes = self._nodes(rows, p.nan_to_num(0.0), params.ints("seed"))
        if self._verification.is_block:
            is_accepted, residual = _accept_block(nodes, is_valid, self._verification.max_drafts)
        else:
            is_accepted, residual = _accept_each(nodes)
        # Rounding may leave nothing of a residual, where p and q are nearly equal.
        is_left = residual.amax(dim=1, keepdim=True) > 0
        weights = torch.where(is_left, residual, nodes.p).clamp_(min=NEVER)
        # PERF: the device's own draw has the noise. It divides by the temperature.
        unfiltered = dataclasses.replace(plan, needs_filter=False, max_top_k=0)
        drawn, _ = self._draw(weights.log() * temperature, rows, tables, unfiltered)
        chosen = torch.where(is_accepted, nodes.drafts, drawn)
        return torch.where(nodes.is_random & ~is_greedy, chosen, tokens), is_valid

    def _nodes(self, rows: LogitsRows, p: Tensor, seeds: Tensor) -> _Nodes:
        root, num_drafts = self._relay.read(WINDOW, rows.rows).unbind(dim=1)
        depths = rows.lens - 1 - root
        has_next = depths < num_drafts
        max_drafts = self._verification.max_drafts
        column = depths.clamp(0, max_drafts - 1)
        drafts = self._relay.read(DRAFTS, rows.rows).gather(1, column[:, None])
        q = self._relay.table(DRAFT_PROBS)[rows.rows, column].to(p.dtype)
        draft_q = q.gather(1, drafts)[:, 0]
        coin_id = torch.full((1,), COIN, device=p.device)
        noise = gumbel_noise(window_seeds(seeds, root), rows.lens, coin_id, torch.float64)
        return _Nodes(
            depths=depths,
            has_next=has_next,
            drafts=drafts[:, 0],
            is_random=has_next & (depths < max_drafts) & (draft_q > 0),
            coins=-torch.expm1(-torch.exp(-noise))[:, 0],
            draft_p=p.gather(1, drafts)[:, 0],
            draft_q=draft_q,
            p=p,
            q=q,
        )


def _accept_each(nodes: _Nodes) -> _Decided:
    return nodes.coins * nodes.draft_q < nodes.draft_p, (nodes.p - nodes.q).clamp(min=0)


def _accept_block(nodes: _Nodes, is_valid: Tensor, max_drafts: int) -> _Decided:
    """A window ends at its first node after which no token is possible, as where a grammar ends:
    the drafts after that node have r = 0."""
    depths, is_random = nodes.depths, nodes.is_random
    factor = torch.ones_like(nodes.draft_p)
    for depth in range(1, max_drafts + 1):
        ratio = torch.where(is_random, factor * nodes.draft_p / nodes.draft_q, 0)
        factor = torch.where(depths == depth, ratio.roll(1).clamp(max=1), factor)
    residual = (factor[:, None] * nodes.p - nodes.q).clamp(min=0)
    mass = residual.sum(dim=1)
    chance = torch.where(factor < 1, mass / (mass + 1 - factor), 1)
    chance = torch.where(is_random & is_valid, chance, factor)
    is_last = (depths > 0) & (nodes.coins < chance)
    is_accepted = torch.zeros_like(is_last)  # whether the node after this one is accepted
    for depth in reversed(range(max_drafts)):
        follows = (is_last | is_accepted).roll(-1)
        is_accepted = torch.where((depths == depth) & nodes.has_next, follows, is_accepted)
    return is_accepted, residual
