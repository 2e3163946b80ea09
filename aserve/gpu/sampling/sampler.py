"""From logits to tokens and logprobs: penalties, bias, mask, bans, then the coupled draw.

It knows no batch and no page table of a step, only rows and lengths: the same call serves plain
rows, held rows and every position of a verify window. It keeps no state between calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.base import wide_logits
from aserve.gpu.sampling.ops import PLAIN_OPS, SampleOps
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.sampling.token_masks import Outputs, ban
from aserve.gpu.transfer.staging import DeviceArrays


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan and its arrays on the device."""

    plan: SamplePlan
    arrays: DeviceArrays
    prefix: str

    def ints(self, name: str) -> Tensor:
        return self.arrays.ints(f"{self.prefix}.{name}")

    def floats(self, name: str) -> Tensor:
        return self.arrays.floats(f"{self.prefix}.{name}")


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens int64 [n]; is_sound bool [n], False where no token could be drawn. Of the rows that
    want logprobs: chosen [m], top_ids int64 [m, k], top_logprobs [m, k], all float32. `prompts`
    where a step owes its rows' prompts something."""

    tokens: Tensor
    is_valid: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    prompts: Tensor | None = None  # int32 [words], as step/prompts.py packs them


class Sampler:
    __slots__ = ("_ops", "_pools", "_tables")

    def __init__(self, tables: RowTables, pools: KvPools, ops: SampleOps = PLAIN_OPS) -> None:
        self._tables = tables
        self._pools = pools
        self._ops = ops

    def sample(self, logits: Tensor, rows: LogitsRows, staged: Staged) -> Sampled:
        """logits [n, vocab], of any dtype, may be overwritten.

        PERF: 256 rows of 152,000 take 78 MB in bfloat16; as float32 they are written and read again
        as 155.
        """
        raw = wide_logits(logits.index_select(0, staged.ints("raw")))
        if staged.plan.adds_to_logits or not self._ops.reads_halves:
            logits = wide_logits(logits)
        self._process(logits, rows, staged)
        if rows.mask is not None:
            self._ops.allow(logits, rows.mask)
        if staged.plan.bans is not None:
            prompt_lens = self._tables.at(rows.rows, logits.dtype).ints("prompt_len")
            outputs = Outputs(rows.rows, rows.lens, prompt_lens, self._pools)
            ban(logits, outputs, lambda name: staged.ints(f"bans.{name}"))
        drawn = self._ops.draw(logits, rows, self._tables, staged.plan)
        chosen, top_ids, top_logprobs = _logprobs(logits, raw, drawn.tokens, staged)
        return Sampled(
            tokens=drawn.tokens,
            is_valid=drawn.is_valid,
            chosen=chosen,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _process(self, logits: Tensor, rows: LogitsRows, staged: Staged) -> None:
        plan = staged.plan
        if len(plan.penalised):
            indices = staged.ints("penalised")
            self._ops.penalise(logits, indices, rows, self._tables, self._pools, plan.max_len)
        if plan.biases.indices:
            indices = staged.ints("indices")
            is_on = rows.lens.index_select(0, indices) < staged.ints("until")
            values = torch.where(is_on, staged.floats("values").to(logits.dtype), 0)
            logits.index_put_((indices, staged.ints("token_ids")), values, accumulate=True)


def _logprobs(
    logits: Tensor, raw: Tensor, tokens: Tensor, staged: Staged
) -> tuple[Tensor, Tensor, Tensor]:
    """Of processed logits, or of the model's own where a row wants those; before temperature."""
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
