"""Drafters for tests. The target itself drafts, and a part of the drafts is made wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.spec.base import AFTER_NORM, DraftRows, Drafts, Verified
from aserve.gpu.spec.drafting import draw_drafts
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.registry import COUPLED
from aserve.gpu.spec.rejection import verification_of
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceStep
from aserve.messages.step import DraftTree
from tests.fakes.hash_model import VOCAB


class Stumbling:
    """A chain, which is right at the positions that are not multiples of `every`. Or, with a
    `flatness` other than 1, drafts of a distribution that is not quite the target's."""

    def __init__(
        self,
        max_drafts: int,
        *,
        every: int = 3,
        flatness: float = 1.0,
        before_extend: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_drafts = max_drafts
        self.tree: DraftTree | None = None
        self.inputs = AFTER_NORM
        self.fields: tuple[RelayField, ...] = ()
        self.key_lookahead = 0
        self.num_forwards = 1
        self._every = every
        self._flatness = flatness
        self._before_extend = before_extend

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        token, drafts = rows.roots, []
        for depth in range(1, rows.num_drafts + 1):
            hidden = runner.forward(runner.init_forward(rows.tokens_at(depth - 1, token)))
            logits = runner.model.logits(hidden) * self._flatness
            token = draw_drafts(runner, logits, rows, depth)
            if self._flatness == 1:
                is_wrong = (rows.lens + depth) % self._every == 0
                drafts.append(torch.where(is_wrong, (token + 1) % VOCAB, token))
            else:
                drafts.append(token)
        return Drafts(torch.stack(drafts, dim=1))

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        """Computes logits, as a drafter might."""
        self._before_extend()
        runner.model.logits(verified.features[0][:1])
        return {}


def speculative(drafter: Stumbling, method: str = COUPLED) -> Speculative:
    """The mode in which the target drafts for itself."""
    verification = verification_of(
        method,
        vocab_size=VOCAB,
        max_drafts=drafter.max_drafts,
        is_tree=drafter.tree is not None,
    )
    mode = Speculative(drafter, verification=verification)
    mode.num_forwards += drafter.max_drafts
    return mode


# Trees of four drafts and depth 2: the right path is 2, 4 or 1, 3.
SHAPES = ((0, 0, 2, 2), (0, 0, 1, 1))
PLACES = ((2, 4), (1, 3))


class StumblingTree(Stumbling):
    """Two drafts of each depth, one of which is wrong. The shape of the tree and the places of the
    right drafts depend on the length of the row."""

    def __init__(self, *, every: int = 5) -> None:
        super().__init__(4, every=every)
        self.tree = DraftTree(max_depth=2)

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        num_drafts = min(rows.num_drafts, 2)
        right = super().draft(runner, dataclasses.replace(rows, num_drafts=num_drafts)).tokens
        right = torch.nn.functional.pad(right, (0, 2 - num_drafts))
        wrong = (right + 1) % VOCAB
        shape = rows.lens % 2
        places = torch.tensor(PLACES, device=shape.device)[shape]
        tokens = wrong.repeat_interleave(2, dim=1).scatter(1, places - 1, right)
        parents = torch.tensor(SHAPES, device=shape.device)[shape]
        return Drafts(tokens, parents)
