"""Samples tokens and logprobs from the logits of a step."""

from __future__ import annotations

# Theory of operation.
#
# `Sampler.sample` gets logits [n, vocab]. A logits row belongs to a row (a request's slot) and has
# a length: the number of tokens before the one to sample. The same call serves decodes, the last
# token of a prefill, rows whose grammar mask came late, and every position of a verify window.
# These steps follow each other, in the order of vLLM's and OpenAI's definitions:
#
#   1. penalties    repetition over prompt and output, frequency and presence over the output
#                   (penalties.py); the history is read from the token pool beside the KV cache
#   2. biases       logit_bias, and -inf for end tokens before the request's minimum length
#   3. mask         the grammar's bit mask: -inf for tokens that the grammar forbids
#   4. bans         allowed_token_ids and bad_words (token_masks.py), unless they would leave a row
#                   no token at all
#   5. draw         temperature, top-k, top-p, min-p and Gumbel noise (draw.py, top_k_top_p.py)
#   6. logprobs     log_softmax of the logits after step 4, or of the model's own logits
#
# Noise is a function of (seed, position, token id), so a draw is coupled: the same request gets the
# same token whatever batch, device or replay it is sampled in, as long as its logits agree. This is
# what makes retries after a failed step, overlap and speculation exact. For the same reason the
# sampler keeps no state between calls.
#
# The host decides before the step which rows need which of these (`plan.SamplePlan`). All shapes
# follow from the plan, so nothing here waits for the device, and a step of greedy rows costs one
# argmax. The index arrays of a plan are staged with the step's other words (`Staged`). The heavy
# operators can be a device's own kernels (`ops.SampleOps`).
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.base import wide_logits
from aserve.gpu.sampling.ops import PLAIN_OPS, SampleOps
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.penalties import penalise
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.sampling.token_masks import Outputs, ban
from aserve.gpu.transfer.staging import DeviceArrays


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan and its arrays on the device, whose names begin with `prefix`."""

    plan: SamplePlan
    arrays: DeviceArrays
    prefix: str

    def ints(self, name: str) -> Tensor:
        return self.arrays.ints(f"{self.prefix}.{name}")

    def floats(self, name: str) -> Tensor:
        return self.arrays.floats(f"{self.prefix}.{name}")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of sampling n logits rows, of which m have logprobs with k alternatives."""

    tokens: Tensor  # int64 [n]
    is_valid: Tensor  # bool [n], False where no token could be drawn
    chosen: Tensor  # float32 [m], logprobs of the tokens
    top_ids: Tensor  # int64 [m, k]
    top_logprobs: Tensor  # float32 [m, k]
    prompts: Tensor | None = None  # int32 [words], prompt logprobs and embeddings (step/prompts.py)


class Sampler:
    __slots__ = ("_ops", "_pools", "_tables")

    def __init__(self, tables: RowTables, pools: KvPools, ops: SampleOps = PLAIN_OPS) -> None:
        self._tables = tables
        self._pools = pools
        self._ops = ops

    def sample(self, logits: Tensor, rows: LogitsRows, staged: Staged) -> Sampled:
        """logits [n, vocab] of any floating dtype; they may be overwritten.

        PERF: 256 rows of 152,000 take 78 MB in bfloat16; widened to float32 they would be written
        and read again as 155 MB. So logits that nothing is added to stay as they are.
        """
        raw = wide_logits(logits.index_select(0, staged.ints("raw")))
        if staged.plan.adds_to_logits or not self._ops.reads_16_bit_logits:
            logits = wide_logits(logits)
        self._process(logits, rows, staged)
        if rows.mask is not None:
            self._ops.allow(logits, rows.mask)
        if staged.plan.bans is not None:
            prompt_lens = self._tables.at(rows.rows, logits.dtype).ints("prompt_len")
            outputs = Outputs(rows.rows, rows.lens, prompt_lens, self._pools, rows.paths)
            ban(logits, outputs, lambda name: staged.ints(f"bans.{name}"))
        tokens, is_valid = self._ops.draw(logits, rows, self._tables, staged.plan)
        chosen, top_ids, top_logprobs = _logprobs(logits, raw, tokens, staged)
        return Sampled(
            tokens=tokens,
            is_valid=is_valid,
            chosen=chosen,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _process(self, logits: Tensor, rows: LogitsRows, staged: Staged) -> None:
        plan = staged.plan
        if len(plan.penalised):
            indices = staged.ints("penalised")
            # A device's own kernel reads the history in the token pool alone.
            op = self._ops.penalise if rows.paths is None else penalise
            op(logits, indices, rows, self._tables, self._pools, plan.max_len)
        if plan.biases.indices:
            indices = staged.ints("indices")
            is_on = rows.lens.index_select(0, indices) < staged.ints("until")
            values = torch.where(is_on, staged.floats("values").to(logits.dtype), 0)
            logits.index_put_((indices, staged.ints("token_ids")), values, accumulate=True)


def _logprobs(
    logits: Tensor, raw: Tensor, tokens: Tensor, staged: Staged
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs before temperature, of the processed logits, or of the model's own (`raw`) for the
    rows that want these."""
    index = staged.ints("scored")
    if not len(index):
        nothing = logits.new_empty(0, dtype=torch.float32)
        return nothing, index.view(0, 0), nothing.view(0, 0)
    scored = wide_logits(logits.index_select(0, index))
    scored.index_copy_(0, staged.ints("raw_indices"), raw)
    scores = scored.log_softmax(dim=1)
    chosen = scores.gather(1, tokens.index_select(0, index)[:, None])[:, 0]
    top_logprobs, top_ids = scores.topk(staged.plan.num_top, dim=1)
    return chosen.float(), top_ids, top_logprobs.float()
