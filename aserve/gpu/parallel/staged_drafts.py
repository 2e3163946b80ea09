"""The drafts of a pipeline: the last stage makes them, and the first one gets them.

    step N   last stage                         first stage
             drafts, from what it has relayed
             sends the drafts             --->  embeds them, and begins the forward
             verifies, extends

The stages in between read no ids. A row is in one step at a time, so the last stage can draft for
it as soon as its step is launched, while it still verifies the step before (early_drafts.py).

A step that has failed, or that was refused because one before it has, makes no drafts. The first
stage must not await them: with the next step that it runs, the last one tells that it has gone on.
The first stage then computes the old steps with drafts of zeros, and the last stage throws away
what comes of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from aserve.errors import ConfigError
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.parallel.pipe import Pipe
from aserve.gpu.spec.base import AFTER_NORM, Drafter, DraftRows, Drafts, HiddenWants, Verified
from aserve.gpu.spec.request import LoadedDrafter, SpecOptions
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceStep
from aserve.messages.step import DraftTree

NOTHING = torch.empty(0, dtype=torch.int64)


class DraftSender:
    """A `Drafter` around that of the last stage, which sends its drafts to the first stage."""

    def __init__(self, drafter: Drafter, pipe: Pipe) -> None:
        self.max_drafts = drafter.max_drafts
        self.tree: DraftTree | None = None
        self.wants: HiddenWants = drafter.wants
        self.fields: tuple[RelayField, ...] = drafter.fields
        self.key_lookahead = drafter.key_lookahead
        self.num_forwards = drafter.num_forwards
        self._drafter = drafter
        self._pipe = pipe
        self._next = 0  # the step behind the last one whose drafts, if it had any, were sent

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        drafts = self._drafter.draft(runner, rows)
        width = rows.num_drafts - drafts.tokens.shape[1]
        self._pipe.send(rows.iteration, functional.pad(drafts.tokens, (0, width)))
        self._next = rows.iteration + 1
        return drafts

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        return self._drafter.extend(runner, step, verified)

    def pass_step(self, iteration: int) -> None:
        """Call it when a step has its drafts, or has none."""
        if iteration > self._next:
            self._pipe.send(iteration, NOTHING)
        self._next = max(self._next, iteration + 1)


class ReceivedDrafts:
    """A `Drafter` of the stages before the last one. Without a pipe, nobody reads its drafts."""

    def __init__(self, max_drafts: int, pipe: Pipe | None) -> None:
        self.max_drafts = max_drafts
        self.tree: DraftTree | None = None
        self.wants = AFTER_NORM
        self.fields: tuple[RelayField, ...] = ()
        self.key_lookahead = 0
        self.num_forwards = 0
        self._pipe = pipe

    def draft(self, _runner: StepRunner, rows: DraftRows) -> Drafts:
        shape = len(rows.rows), rows.num_drafts
        tokens = torch.zeros(shape, dtype=torch.int64, device=rows.rows.device)
        if self._pipe is not None:
            self._pipe.receive(rows.iteration, tokens)
        return Drafts(tokens)

    def extend(
        self, _runner: StepRunner, _step: DeviceStep, _verified: Verified
    ) -> Mapping[str, Tensor]:
        return {}


def received_drafts(max_drafts: int, pipe: Pipe | None) -> LoadedDrafter:
    return LoadedDrafter(ReceivedDrafts(max_drafts, pipe), None, "in the last stage")


def refuse_trees(options: SpecOptions) -> None:
    """WHY: the KV of an accepted path is moved behind its root, on every stage, and only the last
    one knows the path."""
    if options.topk not in (None, 1) or options.token_tree is not None:
        raise ConfigError(
            "--speculative-topk above 1 and --speculative-token-tree do not go with stages: which "
            "path of a tree is accepted is known to the last stage alone; leave out one of both",
            param="speculative_topk",
        )
