"""A chain drafter of several modules, one for each depth, which draft while the step's tokens are
extended, as multi-token prediction does.

    h^0_i = the target's hidden state at i
    h^k_i = module_k(h^{k-1}_i, t_{i+k})    for k = 1 .. D; it predicts t_{i+k+1}

After a step whose last known token is t_L, module k runs over the step's positions up to L - 1. The
tokens behind t_L that it reads are the drafts of the modules before it, and its own draft is drawn
at position L - 1. So the drafts of the next step lie in the relay, and the head of a step runs
nothing. front_rows.py says how KV that was computed from drafts becomes exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.models.base import DraftModel
from aserve.gpu.spec.base import DraftRows, Drafts, HiddenInputs, Verified
from aserve.gpu.spec.drafting import draw_drafts
from aserve.gpu.spec.front_rows import FrontRows
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceStep
from aserve.messages.step import DraftTree

NEXT_DRAFTS = "next_drafts"  # [modules], the drafts of the next step


class MultiLayer:
    """A `Drafter`. Its modules are parts of one draft model, with layers of their own."""

    __slots__ = (
        "_front_rows",
        "_modules",
        "fields",
        "inputs",
        "key_lookahead",
        "max_drafts",
        "num_forwards",
        "tree",
    )

    def __init__(
        self, modules: Sequence[DraftModel], *, hidden_size: int, inputs: HiddenInputs
    ) -> None:
        """hidden_size: of all hidden states of the target that it wants together."""
        self._modules = tuple(modules)
        self.max_drafts = len(modules)
        self.tree: DraftTree | None = None
        self.inputs = inputs
        self.key_lookahead = len(modules)
        self.num_forwards = len(modules)
        self._front_rows = FrontRows(
            len(modules) - 1,
            hidden_size=hidden_size,
            max_width=len(modules) + 1,
            dtype=modules[0].dtype,
        )
        self.fields: tuple[RelayField, ...] = (
            RelayField(NEXT_DRAFTS, (len(modules),), torch.int64),
            *self._front_rows.fields,
        )

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        return Drafts(runner.relay.read(NEXT_DRAFTS, rows.rows)[:, : rows.num_drafts])

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        inputs = self._front_rows.inputs(runner, step, verified)
        batch, last = inputs.batch, inputs.last
        attend = runner.draft_attention(batch)
        rows = _sampled_rows(step, verified)
        ids, hidden, drafts = batch.input_ids, inputs.hidden, list[Tensor]()
        for depth, module in enumerate(self._modules, start=1):
            hidden = module.forward(ids, batch.rope_positions, attend, hidden=hidden)
            logits = module.logits(hidden.index_select(0, last))
            drafts.append(draw_drafts(runner, logits, rows, depth))
            ids = ids.roll(-1).index_copy(0, last, drafts[-1])
        return {NEXT_DRAFTS: torch.stack(drafts, dim=1)}


def _sampled_rows(step: DeviceStep, verified: Verified) -> DraftRows:
    """The rows for which the next step's drafts are drawn."""
    row_of_token = step.batch.token_to_row.index_select(0, verified.starts)
    return DraftRows(
        iteration=step.batch.iteration,
        rows=verified.rows,
        lens=verified.step_lens.index_select(0, row_of_token),
        roots=verified.last,
        num_drafts=0,
        max_len=0,
        needs_noise=any(part.needs_noise for part in step.plan.logits.slices),
        counts=torch.zeros_like(verified.rows),
    )
