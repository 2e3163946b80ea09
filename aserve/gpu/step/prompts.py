"""Scores of prompt tokens and embeddings of prompts, from a step's hidden states.

The model's own distribution: it knows no penalty, mask or temperature, and keeps no state.
`read_prompts` is called on the waiter's thread, everything else on the executor's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.errors import StepError
from aserve.gpu.models.base import wide_logits
from aserve.gpu.step.prompt_plan import PromptPlan
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.base import ArrayI32
from aserve.messages.results import PromptLogprobs, RowEmbedding

LogitsOf = Callable[[Tensor], Tensor]  # hidden states [n, hidden] -> [n, vocab]


@dataclass(frozen=True, slots=True)
class PromptValues:
    """Of the scored tokens: chosen float32 [n], ranks int64 [n], top_ids int64 [n, k], top_logprobs
    float32 [n, k]; of the embedded rows: embeddings float32 [m, hidden], each of length 1.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    embeddings: Tensor

    @property
    def _in_order(self) -> tuple[Tensor, ...]:
        return self.chosen, self.ranks, self.top_ids, self.top_logprobs, self.embeddings

    def packed(self) -> Tensor:
        """int32 [words]; floats keep their bits."""
        return torch.cat(
            [
                values.reshape(-1).view(torch.int32)
                if values.is_floating_point()
                else values.reshape(-1).to(torch.int32)
                for values in self._in_order
            ]
        )


def value_prompts(
    plan: PromptPlan, arrays: DeviceArrays, hidden: Tensor, logits_of: LogitsOf
) -> PromptValues:
    """hidden [tokens, hidden] of the whole step. One slice's logits are alive at a time."""
    indices, token_ids = arrays.ints("scored_places"), arrays.ints("scored_ids")
    scores = [
        _score(
            logits_of(hidden.index_select(0, indices[part])), token_ids[part], num_top=plan.max_top
        )
        for part in plan.slices
    ]
    chosen, ranks, top_ids, top_logprobs = (torch.cat(parts) for parts in zip(*scores, strict=True))
    last = hidden.index_select(0, arrays.ints("embedded_places"))
    return PromptValues(chosen, ranks, top_ids, top_logprobs, _embed(last))


def _score(logits: Tensor, token_ids: Tensor, *, num_top: int) -> tuple[Tensor, ...]:
    """logits [n, vocab], token_ids int64 [n] -> chosen, ranks, top_ids, top_logprobs."""
    logprobs = wide_logits(logits).log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = 1 + (logprobs > chosen).sum(dim=1)
    top_logprobs, top_ids = logprobs.topk(num_top, dim=1)
    return chosen[:, 0].float(), ranks, top_ids, top_logprobs.float()


def _embed(hidden: Tensor) -> Tensor:
    """[n, hidden] -> float32, each of length 1; a narrow dtype would round the length."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return torch.nn.functional.normalize(wide, dim=1).float()


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a step's result says of prompts."""

    logprobs: tuple[PromptLogprobs, ...] = ()
    embeddings: tuple[RowEmbedding, ...] = ()


def read_prompts(words: ArrayI32, plan: PromptPlan) -> Prompts | StepError:
    """words: what `packed` gave. A row whose values are not numbers is an error."""
    num, num_top = len(plan.token_ids), plan.max_top
    sizes = (num, num, num * num_top, num * num_top)
    chosen, ranks, top_ids, top_logprobs, embeddings = np.split(words, np.cumsum(sizes))
    num_rows = len(plan.embedded_rows)
    vectors = np.split(embeddings.view(np.float32), num_rows) if num_rows else []
    is_wrong = np.isnan(chosen.view(np.float32))
    if is_wrong.any():
        row = int(np.repeat(plan.scored_rows, plan.counts)[np.flatnonzero(is_wrong)[0]])
        return StepError(f"row {row}: its prompt's logits are not numbers (NaN)")
    for row, own in zip(plan.embedded_rows, vectors, strict=True):
        if np.isnan(own).any():
            return StepError(f"row {row}: its hidden state is not a number (NaN)")
    ends = np.cumsum(plan.counts)
    return Prompts(
        logprobs=tuple(
            PromptLogprobs(
                row=int(plan.scored_rows[place]),
                position=int(plan.positions[place]),
                chosen=chosen[start:end].tobytes(),
                ranks=ranks[start:end].tobytes(),
                top_ids=top_ids.reshape(num, num_top)[start:end, :wanted].tobytes(),
                top_logprobs=top_logprobs.reshape(num, num_top)[start:end, :wanted].tobytes(),
            )
            for place, (start, end, wanted) in enumerate(
                zip(ends - plan.counts, ends, plan.num_top, strict=True)
            )
        ),
        embeddings=tuple(
            RowEmbedding(int(row), own.tobytes())
            for row, own in zip(plan.embedded_rows, vectors, strict=True)
        ),
    )
