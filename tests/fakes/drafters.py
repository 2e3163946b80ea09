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
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceStep
from aserve.messages.step import DraftTree
from tests.fakes.hash_model import VOCAB


class Stumbling:
    """A chain, which is right at the positions that are not multiples of `every`."""

    def __init__(
        self, max_drafts: int, *, every: int = 3, before_extend: Callable[[], None] = lambda: None
    ) -> None:
        self.max_drafts = max_drafts
        self.tree: DraftTree | None = None
        self.wants = AFTER_NORM
        self.fields: tuple[RelayField, ...] = ()
        self.key_lookahead = 0
        self.num_forwards = 0
        self._every = every
        self._before_extend = before_extend

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        token, drafts = rows.roots, []
        for depth in range(1, rows.num_drafts + 1):
            hidden = runner.forward(runner.init_forward(rows.tokens_at(depth - 1, token)))
            token = draw_drafts(runner, runner.model.logits(hidden), rows, depth)
            is_wrong = (rows.lens + depth) % self._every == 0
            drafts.append(torch.where(is_wrong, (token + 1) % VOCAB, token))
        return Drafts(torch.stack(drafts, dim=1))

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        """Computes logits, as a drafter might."""
        self._before_extend()
        runner.model.logits(verified.features[0][:1])
        return {}


def speculative(drafter: Stumbling) -> Speculative:
    """The mode in which the target drafts for itself."""
    mode = Speculative(drafter)
    mode.num_forwards += drafter.max_drafts
    return mode


# Trees of four drafts and depth 2: the right path is 2, 4 or 1, 3.
SHAPES = ((0, 0, 2, 2), (0, 0, 1, 1))
PLACES = ((2, 4), (1, 3))


class StumblingTree(Stumbling):
    """Two drafts of each depth, one of which is wrong. In a dynamic tree, its shape and the places
    of the right drafts depend on the length of the row."""

    def __init__(self, *, is_dynamic: bool, every: int = 5) -> None:
        super().__init__(4, every=every)
        self.tree = DraftTree(max_depth=2) if is_dynamic else DraftTree(SHAPES[0])
        self._is_dynamic = is_dynamic

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        num_drafts = min(rows.num_drafts, 2)
        right = super().draft(runner, dataclasses.replace(rows, num_drafts=num_drafts)).tokens
        right = torch.nn.functional.pad(right, (0, 2 - num_drafts))
        wrong = (right + 1) % VOCAB
        shape = rows.lens % 2 if self._is_dynamic else torch.zeros_like(rows.lens)
        places = torch.tensor(PLACES, device=shape.device)[shape]
        tokens = wrong.repeat_interleave(2, dim=1).scatter(1, places - 1, right)
        parents = torch.tensor(SHAPES, device=shape.device)[shape]
        return Drafts(tokens, parents if self._is_dynamic else None)
