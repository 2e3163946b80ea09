"""Drafts from the text that a client predicts for its output (`prediction` of OpenAI's API).

The longest suffix of the output that occurs in the text says where the output goes on in it. So in
an edit, the text behind a changed word is found again.

A row with a prediction verifies windows of `NUM_PREDICTED` drafts. All other rows run as they would
without this file: with the drafts of the engine's drafter, or by plain decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.device.fused_step import FusedWindows
from aserve.gpu.device.ops import MakeFusedDraft
from aserve.gpu.spec.base import (
    NO_HIDDEN,
    Drafter,
    DraftRows,
    Drafts,
    Verified,
    histories_of,
    widened,
)
from aserve.gpu.spec.fused import (
    FusedDrafter,
    FusedLookup,
    FuseDrafter,
    LookUp,
)
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.rejection import Verification, forget_probs
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.held import HeldSample
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceState, DeviceStep
from aserve.gpu.step.results import Packed
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.step import DraftTree
from aserve_kernels.draft_chain import DRAFT_PROBS
from aserve_kernels.suffix_match import MatchWindow, SuffixMatch, Texts

BoolArray: TypeAlias = npt.NDArray[np.bool_]

NUM_PREDICTED = 24
WINDOW = MatchWindow(shortest=1, longest=16)


class Predicting:
    """A drafter that drafts for rows with a prediction, and leaves the others to `drafter`, which
    makes chains or trees, or without one has no drafts for them.

    It makes more drafts than `drafter` does, so that the number says which of both a step needs.
    Beside trees, a row whose number of drafts is that of a prediction has a chain.
    """

    __slots__ = (
        *("_drafter", "_match", "fields", "key_lookahead", "max_drafts", "num_forwards", "tree"),
        "inputs",
    )

    def __init__(self, drafter: Drafter | None, match: SuffixMatch) -> None:
        self._drafter = drafter
        self._match = match
        self.tree: DraftTree | None = None
        self.max_drafts = NUM_PREDICTED
        self.inputs, self.key_lookahead, self.num_forwards = NO_HIDDEN, 0, 0
        self.fields: tuple[RelayField, ...] = ()
        if drafter is not None:
            self.max_drafts = max(NUM_PREDICTED, drafter.max_drafts + 1)
            self.inputs, self.fields = drafter.inputs, drafter.fields
            self.key_lookahead, self.num_forwards = drafter.key_lookahead, drafter.num_forwards
            if drafter.tree is not None:
                self.tree = msgspec.structs.replace(drafter.tree, max_nodes=drafter.max_drafts)

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        drafter = self._drafter
        if drafter is None:
            return Drafts(self.look_up(runner.state, rows))
        if rows.num_drafts <= drafter.max_drafts:
            return drafter.draft(runner, rows)
        fewer = dataclasses.replace(rows, num_drafts=drafter.max_drafts)
        own = drafter.draft(runner, fewer)
        has_text = runner.state.tables.texts.lens.index_select(0, rows.rows) > 0
        if own.parents is not None:
            has_text &= rows.counts > drafter.max_drafts
        if DRAFT_PROBS in runner.relay:
            forget_probs(runner.relay, rows.rows, has_text)
        tokens = widened(own.tokens, rows.num_drafts)
        tokens = torch.where(has_text[:, None], self.look_up(runner.state, rows), tokens)
        if own.parents is None:
            return Drafts(tokens)
        chain = torch.arange(rows.num_drafts, device=tokens.device)
        parents = widened(own.parents, rows.num_drafts)
        return Drafts(tokens, torch.where(has_text[:, None], chain, parents))

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        return {} if self._drafter is None else self._drafter.extend(runner, step, verified)

    def look_up(self, state: DeviceState, rows: DraftRows) -> Tensor:
        """int64 [n, num_drafts], arbitrary for rows without a text."""
        tables = state.tables
        prompt_lens = tables.at(rows.rows, torch.float32).ints("prompt_len")
        texts = Texts(
            table=tables.texts.ids,
            lens=tables.texts.lens.index_select(0, rows.rows),
            num_outputs=rows.lens + 1 - prompt_lens,
        )
        return self._match.text(histories_of(state, rows), texts, WINDOW, rows.num_drafts)


class FusedPrediction:
    """The `FusedDrafter` of `Predicting`: rows with a text look up, and the others have `drafter`,
    if there is one."""

    __slots__ = ("_drafter", "_lookup", "_max_own", "_relay", "_texts")

    def __init__(
        self, look_up: LookUp, drafter: FusedDrafter | None, state: DeviceState, *, max_own: int
    ) -> None:
        """`max_own`: the most drafts of `drafter`, beyond which a step needs look-ups."""
        self._lookup = FusedLookup(look_up, state)
        self._drafter = drafter
        self._max_own = max_own
        self._relay = state.relay
        self._texts = state.tables.texts

    def draft(self, plan: StepPlan) -> None:
        has_text = self._has_text(plan)
        if (plan.num_drafts * has_text).any():
            self._lookup.draft(dataclasses.replace(plan, num_drafts=plan.num_drafts * has_text))
            if DRAFT_PROBS in self._relay:
                self._relay.table(DRAFT_PROBS).numpy()[plan.rows[has_text]] = 0
        if self._drafter is not None and (plan.num_drafts * ~has_text).any():
            self._drafter.draft(self._others(plan))

    def extend(self, plan: StepPlan, windows: FusedWindows, features: tuple[Tensor, ...]) -> None:
        if self._drafter is not None:
            self._drafter.extend(self._others(plan), windows, features)

    def _others(self, plan: StepPlan) -> StepPlan:
        """Returns the plan as if rows with a text had no drafts."""
        return dataclasses.replace(plan, num_drafts=plan.num_drafts * ~self._has_text(plan))

    def _has_text(self, plan: StepPlan) -> BoolArray:
        if plan.num_drafts.max(initial=0) <= self._max_own:
            return np.zeros(len(plan.rows), np.bool_)
        has_text: BoolArray = self._texts.lens.numpy()[plan.rows] > 0
        return has_text


class Predicted:
    """The decode mode of an engine without a drafter, or with one that makes chains or dynamic
    trees.

    Without a drafter, or where it is skipped, a step that verifies nothing is a step of plain
    decoding. It publishes no lengths to the host, which knows them. Without a drafter, the graphs
    and the fused step are those of plain decoding.
    """

    __slots__ = (
        *("_has_drafter", "_plain", "_windows", "can_fuse", "caps", "fields", "fused_step"),
        *("graph_widths", "num_draft_forwards", "num_forwards", "sample_ops"),
    )

    def __init__(
        self,
        drafter: Drafter | None,
        match: SuffixMatch,
        fuse: FuseDrafter | None = None,
        verification: Verification | None = None,
    ) -> None:
        self._plain = Autoregressive()
        self._has_drafter = drafter is not None
        predicting = Predicting(drafter, match)

        def fuse_all(make: MakeFusedDraft, state: DeviceState) -> FusedDrafter | None:
            own = None if fuse is None else fuse(make, state)
            if drafter is not None and own is None:
                return None
            max_own = 0 if drafter is None else drafter.max_drafts
            return FusedPrediction(predicting.look_up, own, state, max_own=max_own)

        self._windows = Speculative(predicting, fuse_all, verification)
        width = 1 if drafter is None else drafter.max_drafts + 1
        max_predicted = self._windows.caps.max_tokens_per_step - 1
        self.caps = msgspec.structs.replace(
            self._windows.caps, max_tokens_per_step=width, max_predicted=max_predicted
        )
        self.can_fuse = True
        self.fused_step = self._windows.fused_step
        self.sample_ops = self._windows.sample_ops
        self.fields = self._windows.fields
        self.num_forwards = self._windows.num_forwards
        self.num_draft_forwards = self._windows.num_draft_forwards
        self.graph_widths: tuple[int, ...] = (1, width)

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        self._windows.draft(runner, plan, arrays)

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        plan = step.plan
        if not self._is_plain(plan) or plan.is_bound.any():
            return self._windows.step(runner, step, publish)
        runner.relay.publish(step.batch.rows, step.batch.lens)
        return self._plain.step(runner, step, publish)

    def sample_held(self, runner: StepRunner, held: HeldSample, publish: OnPublish) -> Packed:
        if not self._is_plain(held.plan):
            return self._windows.sample_held(runner, held, publish)
        return self._plain.sample_held(runner, held, publish)

    def _is_plain(self, plan: StepPlan) -> bool:
        is_followed = self._has_drafter and not plan.batch.skips_drafter
        return not is_followed and not plan.num_drafts.any()
