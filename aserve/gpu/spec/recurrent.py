"""A chain drafter of one model that reads hidden states: the target's where they are known, and its
own behind them, as EAGLE does and as a single module of multi-token prediction may.

At position i the model reads the hidden state h_i and token t_{i+1}, and what it computes there
predicts t_{i+2}. After a step whose last accepted token is at position L - 1:

    extend   e_i = model(h_i, t_{i+1}) for the tokens of the step, with the target's h_i
    relay    e_{L-1}
    draft    d_1 = draw(logits(e_{L-1})), then for k = 1, 2, ...
             e_{L+k-1} = model(e_{L+k-2}, d_k) and d_{k+1} = draw(logits(e_{L+k-1}))

So a step with K drafts runs the model K times. What drafting writes at L and after is overwritten
by the next extend, from the target's hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.models.base import DraftModel
from aserve.gpu.spec.base import DraftRows, Drafts, HiddenInputs, Verified
from aserve.gpu.spec.drafting import draw_drafts, extend_inputs
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceStep
from aserve.messages.step import DraftTree

HIDDEN = "draft_hidden"  # the model's hidden state at each row's last position


def joined(features: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(features, dim=1)


class RecurrentChain:
    """A `Drafter`. The model is given the target's hidden states that `inputs` names, which `fuse`
    makes into one tensor, or else what it returned for the token before, [n, hidden_size].

    `token_ids` int64 [draft vocab] are the target's ids of a reduced vocabulary.
    """

    __slots__ = (
        "_fuse",
        "fields",
        "inputs",
        "key_lookahead",
        "max_drafts",
        "model",
        "num_forwards",
        "token_ids",
        "tree",
    )

    def __init__(
        self,
        model: DraftModel,
        max_drafts: int,
        *,
        hidden_size: int,
        inputs: HiddenInputs,
        token_ids: Tensor | None = None,
        fuse: Callable[[tuple[Tensor, ...]], Tensor] = joined,
    ) -> None:
        self.model = model
        self.max_drafts = max_drafts
        self.inputs = inputs
        self.tree: DraftTree | None = None
        self.fields: tuple[RelayField, ...] = (RelayField(HIDDEN, (hidden_size,), model.dtype),)
        self.key_lookahead = 1
        self.num_forwards = max_drafts
        self.token_ids = token_ids
        self._fuse = fuse

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        hidden = runner.relay.read(HIDDEN, rows.rows)
        drafts: list[Tensor] = []
        for depth in range(1, rows.num_drafts + 1):
            if drafts:
                batch = runner.init_forward(rows.tokens_at(depth - 2, drafts[-1]))
                hidden = runner.draft(batch, hidden)
            logits = self.model.logits(hidden)
            drafts.append(draw_drafts(runner, logits, rows, depth, token_ids=self.token_ids))
        return Drafts(torch.stack(drafts, dim=1))

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        inputs = extend_inputs(step, verified, runner.relay)
        batch = dataclasses.replace(inputs.batch, input_ids=inputs.next_ids)
        hidden = runner.draft(batch, self._fuse(inputs.features))
        return {HIDDEN: hidden.index_select(0, inputs.last)}
