"""The protocol of a drafter, and the values that it exchanges with the speculative decode mode.

A drafter guesses the next tokens of rows. It decides nothing else: the mode verifies the guesses
with the target model, so a bad drafter costs time and never changes a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.step.forward_batch import DeviceBatch
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceState, DeviceStep
from aserve.messages.step import DraftTree
from aserve_kernels.histories import Histories


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows that get drafts in a step, before the step's forward. Tensors are int64 [n].

    The step has pages for the root and the drafts of each row behind `lens`, so a drafter may write
    its own KV there. Forwards have a fixed shape: where a row has fewer drafts than others, the
    tokens beyond its last draft share that draft's position and slot, and what they give is not
    used.
    """

    iteration: int
    rows: Tensor
    lens: Tensor  # KV lengths, which are the positions of the roots
    roots: Tensor  # the last known token of each row; it has no KV yet
    num_drafts: int  # of the row that gets the most
    max_len: int  # an upper bound of lens, plus twice num_drafts, plus 1
    needs_noise: bool  # some row of the step is sampled with a temperature
    counts: Tensor  # drafts of each row

    def tokens_at(self, offset: int, input_ids: Tensor) -> DeviceBatch:
        """Returns a forward of one token per row, at position `lens + offset`."""
        return self.block_at(offset, input_ids[:, None])

    def block_at(self, offset: int, input_ids: Tensor) -> DeviceBatch:
        """Returns a forward of the tokens `input_ids`, int64 [n, width], from `lens + offset`."""
        num_rows, width = input_ids.shape
        device = self.rows.device
        order = torch.arange(num_rows, device=device)
        # A padding row of a captured step has no position before its root.
        lens = (self.lens + self.counts.clamp(max=offset)).clamp_(min=0)
        left = self.lens + self.counts - lens  # places of a row behind its first token here
        return DeviceBatch(
            iteration=self.iteration,
            rows=self.rows,
            query_lens=torch.full_like(self.rows, width),
            kv_lens=lens,
            input_ids=input_ids.reshape(-1),
            token_to_row=order.repeat_interleave(width) if width > 1 else order,
            offsets=torch.minimum(torch.arange(width, device=device), left[:, None]).flatten(),
            query_lens_cpu=np.full(num_rows, width, np.int32),
            len_bounds_cpu=np.full(num_rows, self.max_len, np.int32),
        )


def histories_of(state: DeviceState, rows: DraftRows) -> Histories:
    return row_histories(
        state, rows=rows.rows, lens=rows.lens, roots=rows.roots, max_len=rows.max_len
    )


def row_histories(
    state: DeviceState, *, rows: Tensor, lens: Tensor, roots: Tensor, max_len: int
) -> Histories:
    """Returns the tokens of rows. See `Histories` for the arguments."""
    pools = state.pools
    return Histories(
        page_table=pools.page_tables[0],
        token_pool=pools.token_pool,
        page_size=pools.page_size,
        rows=rows,
        lens=lens,
        roots=roots,
        max_len=max_len,
    )


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of n rows. Without `parents` they are a chain."""

    tokens: Tensor  # int64 [n, <= max_drafts]
    # int64 [n, <= max_drafts]: the number of each draft's parent, as in DraftTree
    parents: Tensor | None = None


def widened(values: Tensor, width: int) -> Tensor:
    """values [n, <= width] -> [n, width], with zeros behind them."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of a step's verification, for its n sampled rows. Tensors are int64.

    `paths[i, d]` is the index of the accepted node of depth d in the row's window, whose root has
    index 0; `starts` are the indices of the roots among the step's tokens. From `counts` on, paths
    and tokens are arbitrary, but valid. In the pools, the accepted path is compacted already.
    """

    rows: Tensor  # [n]
    starts: Tensor  # [n]
    paths: Tensor  # [n, depth + 1]
    tokens: Tensor  # [n, depth + 1], the emitted tokens; the last one has no KV yet
    counts: Tensor  # [n], emitted tokens, at least 1
    last: Tensor  # [n], the last emitted tokens
    step_lens: Tensor  # [rows of the step], KV lengths after the step
    features: tuple[Tensor, ...]  # [tokens, hidden] each: what the drafter asked for


@dataclass(frozen=True, slots=True)
class HiddenInputs:
    """The hidden states of the target that a drafter reads: the residual stream after some layers,
    or what enters the final norm; without either, what leaves the final norm, or nothing."""

    layer_ids: tuple[int, ...] = ()
    before_norm: bool = False
    is_empty: bool = False

    def capture(self) -> HiddenCapture | None:
        """Returns a new capture for one forward, or None if it needs none."""
        if not self.layer_ids and not self.before_norm:
            return None
        return HiddenCapture(self.layer_ids, self.before_norm)

    def features(self, capture: HiddenCapture | None, hidden: Tensor) -> tuple[Tensor, ...]:
        """Returns the hidden states of a forward, [tokens, hidden] each."""
        if self.is_empty:
            return ()
        if capture is None:
            return (hidden,)
        if capture.before_norm is not None:
            return (*capture.layers, capture.before_norm)
        return tuple(capture.layers)


AFTER_NORM = HiddenInputs()
NO_HIDDEN = HiddenInputs(is_empty=True)


class Drafter(Protocol):
    """Drafts at the head of a step, and catches up with the target at its end.

    Between steps the state of a row lives in relay fields and in the KV pools of its model.
    """

    max_drafts: int  # of a row in one step
    tree: DraftTree | None  # None: drafts are a chain
    inputs: HiddenInputs
    fields: tuple[RelayField, ...]
    key_lookahead: int  # as in DecodeCaps
    num_forwards: int  # of its model in a step, at most

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        """Guesses the tokens after the roots."""

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        """Computes the drafter's KV of the step's tokens. Returns values of its relay fields, one
        for each sampled row."""
