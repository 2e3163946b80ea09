"""Drafters of chains as compiled calls: a chain is one call, and so is the extend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from aserve.gpu.device.fused_step import FusedDraft, FusedRows, FusedWindows
from aserve.gpu.device.ops import MakeFusedDraft
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.draft_decoder import DraftDecoder
from aserve.gpu.spec.fused import FusedDrafter, kept_tokens
from aserve.gpu.step.future_map import FutureMap
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceState
from aserve_kernels.draft_chain import FROZEN, RECURRENT, TOKENS

Fuse = Callable[[tuple[Tensor, ...]], Tensor]


class FusedTokens:
    """The `FusedDrafter` of a model that reads tokens alone."""

    __slots__ = ("_model",)

    def __init__(self, model: FusedDraft) -> None:
        self._model = model

    def draft(self, plan: StepPlan) -> None:
        self._model.draft_chain(plan, TOKENS)

    def extend(self, plan: StepPlan, windows: FusedWindows, features: tuple[Tensor, ...]) -> None:
        """A chain lacks the KV of its last draft, which matters if all drafts were accepted."""
        num_kept, query_lens = windows.lens - windows.kv_lens, plan.query_lens
        is_whole = windows.counts == 1 + plan.num_drafts
        num_new = np.where(plan.num_drafts == 0, num_kept, is_whole.astype(np.int64))
        has_new = np.flatnonzero(num_new)
        if not len(has_new):
            return
        lens = num_new[has_new]
        ends = (query_lens.cumsum() - query_lens + num_kept)[has_new]
        indices = np.repeat(ends - lens.cumsum(), lens) + np.arange(lens.sum())
        own = FusedRows(plan.rows[has_new].astype(np.int64), windows.lens[has_new], lens)
        self._model.forward(windows.token_ids[indices], own)


class FusedRecurrent:
    """The `FusedDrafter` of a `RecurrentChain`. `fuse` is as there."""

    __slots__ = ("_field", "_fuse", "_model", "_relay")

    def __init__(self, model: FusedDraft, relay: FutureMap, *, field: str, fuse: Fuse) -> None:
        self._model = model
        self._relay = relay
        self._field = field
        self._fuse = fuse

    def draft(self, plan: StepPlan) -> None:
        self._model.draft_chain(plan, RECURRENT, self._field)

    def extend(self, plan: StepPlan, windows: FusedWindows, features: tuple[Tensor, ...]) -> None:
        kept = kept_tokens(plan, windows, self._relay)
        hidden = self._fuse(tuple(values.index_select(0, kept.indices) for values in features))
        outputs = self._model.forward(kept.next_ids, kept.rows, hidden)
        self._relay.write(self._field, *kept.of_last(outputs))


class FusedFrozen:
    """The `FusedDrafter` of a model that reads the target's KV, and hidden states."""

    __slots__ = ("_field", "_model", "_relay")

    def __init__(self, model: FusedDraft, relay: FutureMap, *, field: str) -> None:
        self._model = model
        self._relay = relay
        self._field = field

    def draft(self, plan: StepPlan) -> None:
        self._model.draft_chain(plan, FROZEN, self._field)

    def extend(self, plan: StepPlan, windows: FusedWindows, features: tuple[Tensor, ...]) -> None:
        (hidden,) = features
        kept = kept_tokens(plan, windows, self._relay)
        self._relay.write(self._field, *kept.of_last(hidden.index_select(0, kept.indices)))


def fuse_tokens(
    model: CausalModel, make: MakeFusedDraft, state: DeviceState
) -> FusedDrafter | None:
    made = make(model, state)
    return None if made is None else FusedTokens(made)


def fuse_recurrent(
    model: DraftDecoder, fuse: Fuse, field: str, make: MakeFusedDraft, state: DeviceState
) -> FusedDrafter | None:
    made = make(model, state)
    return None if made is None else FusedRecurrent(made, state.relay, field=field, fuse=fuse)


def fuse_frozen(
    model: DraftDecoder, field: str, make: MakeFusedDraft, state: DeviceState
) -> FusedDrafter | None:
    made = make(model, state)
    return None if made is None else FusedFrozen(made, state.relay, field=field)
