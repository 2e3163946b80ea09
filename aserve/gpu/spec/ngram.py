"""Drafts by prompt lookup: the longest suffix of the row's tokens is found where it occurred last
in its own prompt and output, and what followed there is the draft. It needs no model.

Where a longer part of the suffix occurs in the outputs of other rows of the namespace, their tokens
are the draft instead. `shared_table.py` of the kernels has the table that finds them; this drafter
fills it at the end of each step. It holds outputs only, as the global tree of SuffixDecoding does
(Oliaro et al., 2025).

The token ids of every row lie in the token pool on the device, those that the host does not know
yet included. So the drafter sees the newest tokens under overlap, and keeps no state of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.device.fused_step import FusedWindows
from aserve.gpu.sampling.namespaces import NUM_SHARES
from aserve.gpu.spec.base import (
    NO_HIDDEN,
    DraftRows,
    Drafts,
    Verified,
    histories_of,
    row_histories,
)
from aserve.gpu.spec.fused import FusedLookup
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter, SpecOptions
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, RelayField
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceState, DeviceStep
from aserve.messages.step import DraftTree
from aserve_kernels.histories import Histories
from aserve_kernels.shared_table import TableRows
from aserve_kernels.suffix_match import MatchWindow, SuffixMatch

SHORTEST = 1
LONGEST = 12
TABLE_SIZE = 1 << 16


class NgramDrafter:
    """A chain of `max_drafts` tokens. `shared` int64 [1 + NUM_SHARES, size] is the table, or None
    if rows look at their own tokens only."""

    __slots__ = (
        *("_match", "_window", "fields", "key_lookahead", "max_drafts", "num_forwards", "shared"),
        *("tree", "inputs"),
    )

    def __init__(
        self,
        max_drafts: int,
        window: MatchWindow,
        match: SuffixMatch,
        shared: Tensor | None = None,
    ) -> None:
        self._window = window
        self._match = match
        self.shared = shared
        self.max_drafts = max_drafts
        self.tree: DraftTree | None = None
        self.inputs = NO_HIDDEN
        self.fields: tuple[RelayField, ...] = ()
        self.key_lookahead = 0
        self.num_forwards = 0

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        return Drafts(self.look_up(runner.state, rows))

    def look_up(self, state: DeviceState, rows: DraftRows) -> Tensor:
        """Returns the drafts, int64 [rows, num_drafts]."""
        histories = histories_of(state, rows)
        drafts, lengths = self._match.history(histories, self._window, rows.num_drafts)
        if self.shared is None:
            return drafts
        table = _rows_of(self.shared, state, histories)
        return self._match.shared.continue_shared(table, drafts, lengths)

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        lens = step.batch.cache_positions.index_select(0, verified.starts) + verified.counts
        histories = row_histories(
            runner.state,
            rows=verified.rows,
            lens=lens,
            roots=verified.last,
            max_len=int(step.plan.len_bounds.max(initial=0)) + 1,
        )
        self.remember(runner.state, histories, verified.counts, most=verified.tokens.shape[1])
        return {}

    def remember(
        self, state: DeviceState, histories: Histories, counts: Tensor, *, most: int
    ) -> None:
        """Adds the last counts[i] tokens of each row, at most `most`, to the table."""
        if self.shared is not None:
            table = _rows_of(self.shared, state, histories)
            self._match.shared.remember(table, counts, most)


def _rows_of(entries: Tensor, state: DeviceState, histories: Histories) -> TableRows:
    columns = state.tables.at(histories.rows, torch.float32)
    return TableRows(entries, columns.ints("namespace"), columns.ints("share"), histories)


class FusedNgrams:
    """The `FusedDrafter` of `NgramDrafter`."""

    __slots__ = ("_drafter", "_lookup", "_state", "draft")

    def __init__(self, drafter: NgramDrafter, state: DeviceState) -> None:
        self._drafter = drafter
        self._state = state
        self.draft = FusedLookup(drafter.look_up, state).draft

    def extend(self, plan: StepPlan, windows: FusedWindows, features: tuple[Tensor, ...]) -> None:
        own = np.flatnonzero(windows.counts)
        rows, relay = torch.from_numpy(plan.rows[own].astype(np.int64)), self._state.relay
        histories = row_histories(
            self._state,
            rows=rows,
            lens=relay.read(SEQ_LEN, rows),
            roots=relay.read(LAST_TOKEN, rows),
            max_len=int(plan.len_bounds.max(initial=0)) + 1,
        )
        counts = windows.counts[own]
        self._drafter.remember(
            self._state, histories, torch.from_numpy(counts), most=int(counts.max(initial=0))
        )


def load(request: DraftRequest) -> LoadedDrafter:
    options = request.options
    num_drafts = request.chain_len(default=7)
    window = _window(options)
    about = f"{num_drafts} tokens after matches of {window.shortest} to {window.longest}"
    size = TABLE_SIZE if options.shared_table_size is None else options.shared_table_size
    shared = None
    if size:
        device = request.plan.target.device
        shared = torch.zeros((1 + NUM_SHARES, size), dtype=torch.int64, device=device)
        about += f", or in {NUM_SHARES} tables of {size:,} n-grams"
    drafter = NgramDrafter(num_drafts, window, request.ops.suffix_match, shared)
    return LoadedDrafter(
        drafter, None, about, fuse=lambda _make, state: FusedNgrams(drafter, state)
    )


def _window(options: SpecOptions) -> MatchWindow:
    shortest, longest = options.min_match_len or SHORTEST, options.max_match_len or LONGEST
    if shortest > longest:
        raise ConfigError(
            f"a match of at least {shortest} tokens cannot have at most {longest}; change "
            "--speculative-min-match-len or --speculative-max-match-len",
            param="speculative_min_match_len",
        )
    return MatchWindow(shortest, longest)
