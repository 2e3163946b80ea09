"""Routing: which experts see a token, and how much each of them counts.

A router gives one logit per token and expert. All families are choices in one scheme:

    scores = softmax(logits) | sigmoid(logits) | logits
    choice = scores + bias,  -inf outside of the chosen groups of experts
    experts = the top k of choice
    weights = scores of these experts, normalised or not, times a factor

The bias takes part in the choice alone (https://arxiv.org/abs/2408.15664). A group's score is that
of its best expert (DeepSeek-V2, https://arxiv.org/abs/2405.04434) or the sum of its two best
(DeepSeek-V3, https://arxiv.org/abs/2412.19437).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from aserve.gpu.models.config.fields import Fields


class Scores(Enum):
    """The function from logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    LOGITS = "logits"  # the weights are then a softmax over the chosen experts


class ExpertGroups(msgspec.Struct, frozen=True):
    """Experts are chosen from the `num_kept` best of `count` groups of equal size. A group's score
    is the sum of its `num_summed` best experts."""

    count: int
    num_kept: int
    num_summed: int


class Routing(msgspec.Struct, frozen=True):
    top_k: int
    scores: Scores = Scores.SOFTMAX
    groups: ExpertGroups | None = None
    is_normalised: bool = False  # the chosen weights sum to 1, before the factor
    factor: float = 1.0


def checked_top_k(fields: Fields, num_experts: int, *, name: str = "num_experts_per_tok") -> int:
    """Returns the number of experts per token, which the config has under this name."""
    top_k = fields.integer(name)
    if top_k > num_experts:
        fields.refuse(name, expected=f"at most {num_experts}, the experts there are")
    return top_k


def expert_groups(fields: Fields, num_experts: int, *, num_summed: int) -> ExpertGroups | None:
    """The config's `n_group` and `topk_group`; None if all experts are one group."""
    count = fields.integer("n_group")
    num_kept = fields.integer("topk_group")
    if count == 1:
        return None
    if num_experts % count or num_experts // count < num_summed:
        fields.refuse("n_group", expected=f"a divisor of {num_experts} experts")
    if num_kept > count:
        fields.refuse("topk_group", expected=f"at most n_group, {count}")
    return ExpertGroups(count, num_kept, num_summed)


class Routed(NamedTuple):
    """The chosen experts of each token. Where fewer than k are chosen, the number of experts stands
    for one that is not there, with the weight 0."""

    experts: Tensor  # int64 [tokens, k]
    weights: Tensor  # [tokens, k], at least float32


# Added to the sum that weights are divided by, as in the reference code of DeepSeek-V3.
TINY = 1e-20


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> Routed:
    """logits [tokens, experts]; bias float [experts], or None."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = _scores(logits, routing.scores)
    choice = scores if bias is None else scores + bias
    if routing.groups is not None:
        choice = _outside_groups(choice, routing.groups)
    experts = choice.topk(routing.top_k, dim=1).indices
    weights = scores.gather(1, experts)
    if routing.scores is Scores.LOGITS:
        weights = weights.softmax(dim=1)
    elif routing.is_normalised:
        weights = weights / (weights.sum(dim=1, keepdim=True) + TINY)
    return Routed(experts, weights * routing.factor)


def without_identity(routed: Routed, num_experts: int) -> tuple[Routed, Tensor]:
    """Takes the experts from `num_experts` on, which are identities, out of the choice. Returns the
    rest, and the sums of their weights [tokens, 1]."""
    is_identity = routed.experts >= num_experts
    rest = Routed(
        routed.experts.clamp(max=num_experts), routed.weights.masked_fill(is_identity, 0.0)
    )
    return rest, routed.weights.masked_fill(~is_identity, 0.0).sum(dim=1, keepdim=True)


def _scores(logits: Tensor, function: Scores) -> Tensor:
    match function:
        case Scores.SOFTMAX:
            return logits.softmax(dim=1)
        case Scores.SIGMOID:
            return logits.sigmoid()
        case Scores.LOGITS:
            return logits


def _outside_groups(choice: Tensor, groups: ExpertGroups) -> Tensor:
    """The scores, with -inf for experts of groups that were not chosen."""
    by_group = choice.view(len(choice), groups.count, -1)
    group_scores = by_group.topk(groups.num_summed, dim=2).values.sum(dim=2)
    kept = group_scores.topk(groups.num_kept, dim=1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return by_group.masked_fill(is_out[:, :, None], -torch.inf).flatten(1)
