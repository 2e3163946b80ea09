"""The drafter of several modules as compiled calls, one forward and one draw for each module.

It does what multi_layer.py and front_rows.py do, on the host: here a row starts at its first front
row that is to be written, and ends at its last accepted token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.device.fused_step import FusedDraft, FusedRows, FusedWindows, Int64s
from aserve.gpu.spec.front_rows import HIDDEN, SPAN
from aserve.gpu.spec.fused import KeptTokens, kept_tokens
from aserve.gpu.spec.multi_layer import NEXT_DRAFTS
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS, DeviceState


class FusedModules:
    """The `FusedDrafter` of a `MultiLayer`."""

    __slots__ = ("_models", "_num_fronts", "_state")

    def __init__(self, models: Sequence[FusedDraft], state: DeviceState) -> None:
        self._models = tuple(models)
        self._num_fronts = len(self._models) - 1
        self._state = state

    def draft(self, plan: StepPlan) -> None:
        relay = self._state.relay
        drafting = plan.rows[plan.num_drafts > 0]
        drafts = relay.table(NEXT_DRAFTS).numpy()[drafting]
        relay.table(DRAFTS).numpy()[drafting, : drafts.shape[1]] = drafts

    def extend(self, plan: StepPlan, windows: FusedWindows, features: tuple[Tensor, ...]) -> None:
        relay = self._state.relay
        kept = kept_tokens(plan, windows, relay)
        rows = kept.rows.rows
        firsts = self._first_positions(plan, windows)
        query_lens = windows.lens - firsts
        own = FusedRows(rows, windows.lens, query_lens)
        ends = query_lens.cumsum()
        positions = np.arange(ends[-1]) - np.repeat(own.starts - firsts, query_lens)
        ids = self._token_ids(np.repeat(rows, query_lens), positions + 1)
        ids[ends - 1] = kept.next_ids[kept.last]
        joined = torch.cat(features, dim=1) if len(features) > 1 else features[0]
        hidden = self._hidden_states(kept, windows, own, joined)
        self._keep(own, hidden)
        sampled = np.flatnonzero(kept.is_sampled)
        last, indices = ends[sampled] - 1, torch.from_numpy(ends[sampled] - 1)
        drafts = relay.table(NEXT_DRAFTS).numpy()
        for depth, model in enumerate(self._models):
            hidden = model.forward(ids, own, hidden)
            roots = windows.lens[sampled]
            last_hidden = hidden.index_select(0, indices)
            drawn = model.draw(last_hidden, rows[sampled], roots + 1 + depth, roots)
            drafts[rows[sampled], depth] = drawn
            ids = np.roll(ids, -1)
            ids[last] = drawn

    def _first_positions(self, plan: StepPlan, windows: FusedWindows) -> Int64s:
        """Returns the position at which each row starts, and notes which the relay then knows."""
        span = self._state.relay.table(SPAN).numpy()
        span[[init.row for init in plan.batch.row_inits]] = 0
        known_from, known_to = span[plan.rows].T
        known_from = np.where(known_to == windows.kv_lens, known_from, windows.kv_lens)
        span[plan.rows] = np.stack((known_from, windows.lens), axis=1)
        firsts: Int64s = np.maximum(known_from, windows.kv_lens - self._num_fronts)
        return firsts

    def _token_ids(self, rows: Int64s, positions: Int64s) -> Int64s:
        """Returns the tokens at these positions. A position behind the pages has an arbitrary
        one."""
        pools = self._state.pools
        table = pools.page_tables[0].numpy()
        columns = np.minimum(positions // pools.page_size, table.shape[1] - 1)
        slots = table[rows, columns] * pools.page_size + positions % pools.page_size
        ids: Int64s = pools.token_pool.numpy()[slots].astype(np.int64)
        return ids

    def _hidden_states(
        self, kept: KeptTokens, windows: FusedWindows, own: FusedRows, features: Tensor
    ) -> Tensor:
        """Returns the target's hidden states of the rows' tokens: those that were kept in the
        relay, then those of the step."""
        num, table = self._num_fronts, self._state.relay.table(HIDDEN)
        fronts = table.index_select(0, torch.from_numpy(own.rows)).flatten(0, 1)
        row = np.repeat(np.arange(len(own.rows)), own.query_lens)
        offsets = np.arange(len(row)) - (own.starts + own.query_lens - kept.rows.query_lens)[row]
        index = np.where(
            offsets < 0,
            (row + 1) * num + offsets,
            len(fronts) + kept.indices.numpy()[kept.rows.starts[row] + np.maximum(offsets, 0)],
        )
        return torch.cat((fronts, features)).index_select(0, torch.from_numpy(index))

    def _keep(self, own: FusedRows, hidden: Tensor) -> None:
        """Keeps the hidden states of the last positions, which are front rows of the next step."""
        ends = own.query_lens.cumsum()
        indices = np.maximum(ends[:, None] + np.arange(-self._num_fronts, 0), 0)
        kept = hidden.index_select(0, torch.from_numpy(indices.ravel()))
        rows = torch.from_numpy(own.rows)
        self._state.relay.write(HIDDEN, rows, kept.unflatten(0, indices.shape))
