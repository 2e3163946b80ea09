"""Prompt logprobs and embeddings: what a step computes for the prompts of its rows.

`plan_prompts` selects the tokens on the host, `score_prompts` computes on the device, and
`read_prompts` reads the packed result on the waiter's thread. Scores are of the model's own
distribution: without penalties, masks or temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.errors import StepError
from aserve.gpu.models.base import wide_logits
from aserve.gpu.models.pooling import LAST_TOKEN, PooledTokens, Pooler
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.results import PromptLogprobs, RowEmbedding
from aserve.messages.step import ScheduleBatch

LogitsOf = Callable[[Tensor], Tensor]  # hidden states [n, hidden] -> [n, vocab]


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt tokens to score and the prompts to embed. Indices are into the step's tokens, and
    those of one row follow each other."""

    scored_rows: ArrayI32  # [scored rows]
    counts: ArrayI32  # [scored rows], number of scored tokens
    positions: ArrayI32  # [scored rows], position of the first scored token in its prompt
    num_top: ArrayI32  # [scored rows], number of alternatives per token
    max_top: int  # the largest num_top
    indices: ArrayI32  # [scored tokens], the token before each, whose logits score it
    token_ids: ArrayI32  # [scored tokens]
    slices: tuple[slice, ...]  # parts of the scored tokens; at least one, which may be empty
    embedded_rows: ArrayI32  # [embedded rows]
    embedded_indices: ArrayI32  # [tokens of embedded rows]
    embedded_lens: ArrayI32  # [embedded rows], number of their tokens in this step
    last_indices: ArrayI32  # [embedded rows], the last token of each prompt

    def stage(self, arrays: HostArrays) -> None:
        arrays.add("scored_indices", self.indices)
        arrays.add("scored_ids", self.token_ids)
        arrays.add("embedded_indices", self.embedded_indices)
        arrays.add("embedded_lens", self.embedded_lens)
        arrays.add("embedded_last", self.last_indices)


def plan_prompts(
    batch: ScheduleBatch, row_params: RowParams, *, vocab_size: int, slice_len: int
) -> PromptPlan | None:
    """None if the step computes no token of a prompt that is scored or embedded. `row_params` must
    already hold the batch's row_inits.

    NOTE: a KV length that is only a bound belongs to a row that has left its prompt.
    """
    if not row_params.have_prompt_wants:
        return None
    rows, query_lens, kv_lens = map(array_i32, (batch.rows, batch.query_lens, batch.kv_lens))
    ends = np.cumsum(query_lens, dtype=np.int32)
    counts = (row_params.scored_lens(rows) - kv_lens).clip(0, query_lens)
    scored = np.flatnonzero(counts)
    embedded = np.flatnonzero(row_params.embedded_lens(rows) == kv_lens + query_lens)
    if not len(scored) and not len(embedded):
        return None
    indices = _ranges((ends - query_lens)[scored], counts[scored])
    num_top = row_params.num_prompt_logprobs(rows[scored])
    return PromptPlan(
        scored_rows=rows[scored],
        counts=counts[scored],
        positions=kv_lens[scored] + 1,
        num_top=num_top,
        max_top=min(int(num_top.max(initial=0)), vocab_size),
        indices=indices,
        token_ids=_next_tokens(batch, ends)[indices],
        slices=tuple(
            slice(start, start + slice_len) for start in range(0, max(len(indices), 1), slice_len)
        ),
        embedded_rows=rows[embedded],
        embedded_indices=_ranges((ends - query_lens)[embedded], query_lens[embedded]),
        embedded_lens=query_lens[embedded],
        last_indices=ends[embedded] - 1,
    )


def _ranges(starts: ArrayI32, counts: ArrayI32) -> ArrayI32:
    """Returns the ranges start, start + 1, ..., one after the other."""
    before = np.cumsum(counts, dtype=np.int32) - counts
    ranges: ArrayI32 = np.arange(counts.sum(), dtype=np.int32) + np.repeat(starts - before, counts)
    return ranges


def _next_tokens(batch: ScheduleBatch, ends: ArrayI32) -> ArrayI32:
    """[tokens], the token after each token of the step. It is known within a prompt."""
    following: ArrayI32 = np.roll(array_i32(batch.input_ids), -1)
    following[ends - 1] = array_i32(batch.next_ids)
    return following


def score_prompts(
    plan: PromptPlan,
    arrays: DeviceArrays,
    hidden: Tensor,
    logits_of: LogitsOf,
    pooler: Pooler = LAST_TOKEN,
) -> Tensor:
    """hidden [tokens, hidden] of the whole step -> int32 [words], as `read_prompts` reads them.

    The words are, of the scored tokens, chosen float32 [n], ranks [n], top_ids [n, k] and
    top_logprobs float32 [n, k]; then the pooled vectors float32 [rows, size]. Floats keep their
    bits. Only one slice's logits are in memory at a time.
    """
    indices, token_ids = arrays.ints("scored_indices"), arrays.ints("scored_ids")
    scores = [
        _score(
            logits_of(hidden.index_select(0, indices[part])), token_ids[part], num_top=plan.max_top
        )
        for part in plan.slices
    ]
    of_tokens = (torch.cat(parts) for parts in zip(*scores, strict=True))
    pooled = _pooled(arrays, hidden, pooler)
    return torch.cat([_as_words(values) for values in (*of_tokens, pooled)])


def _as_words(values: Tensor) -> Tensor:
    flat = values.reshape(-1)
    return flat.view(torch.int32) if flat.is_floating_point() else flat.to(torch.int32)


def _score(logits: Tensor, token_ids: Tensor, *, num_top: int) -> tuple[Tensor, ...]:
    """logits [n, vocab], token_ids int64 [n] -> chosen, ranks, top_ids, top_logprobs."""
    logprobs = wide_logits(logits).log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids[:, None])
    # PERF: a sum of bools as int64 takes twice as long on a CPU.
    ranks = 1 + (logprobs > chosen).sum(dim=1, dtype=torch.int32)
    top_logprobs, top_ids = logprobs.topk(num_top, dim=1)
    return chosen[:, 0].float(), ranks, top_ids, top_logprobs.float()


def _pooled(arrays: DeviceArrays, hidden: Tensor, pooler: Pooler) -> Tensor:
    indices, lens, last = map(arrays.ints, ("embedded_indices", "embedded_lens", "embedded_last"))
    return pooler(hidden, PooledTokens(indices, lens, last))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompt logprobs and embeddings of one step's result."""

    logprobs: tuple[PromptLogprobs, ...] = ()
    embeddings: tuple[RowEmbedding, ...] = ()


def read_prompts(words: ArrayI32, plan: PromptPlan) -> Prompts | StepError:
    """words: the result of `score_prompts`, on the host. NaN values are an error."""
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
                row=int(plan.scored_rows[index]),
                position=int(plan.positions[index]),
                chosen=chosen[start:end].tobytes(),
                ranks=ranks[start:end].tobytes(),
                top_ids=top_ids.reshape(num, num_top)[start:end, :own_top].tobytes(),
                top_logprobs=top_logprobs.reshape(num, num_top)[start:end, :own_top].tobytes(),
            )
            for index, (start, end, own_top) in enumerate(
                zip(ends - plan.counts, ends, plan.num_top, strict=True)
            )
        ),
        embeddings=tuple(
            RowEmbedding(int(row), own.tobytes())
            for row, own in zip(plan.embedded_rows, vectors, strict=True)
        ),
    )
