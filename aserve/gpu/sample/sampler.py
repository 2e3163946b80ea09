"""From logits to tokens and logprobs: penalties, bias, mask, bans, then the coupled draw.

It knows no batch and no page table of a step, only rows and lengths: the same call serves plain
rows, held rows and every position of a verify window. It keeps no state between calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.prompt_values import PromptValues
from aserve.gpu.sample.bans import Outputs, ban
from aserve.gpu.sample.choose import choose, draw, set_limits
from aserve.gpu.sample.noise import gumbel_noise
from aserve.gpu.sample.penalties import penalise
from aserve.gpu.sample.plan import SamplePlan
from aserve.gpu.sample.row_tables import RowParams, RowTables
from aserve.gpu.sections import DeviceSections


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Which row each logits row belongs to and how many tokens come before the one to sample:
    int64 [n]. `mask` int32 [n, ceil(vocab / 32)] allows tokens by bit."""

    rows: Tensor
    lens: Tensor
    mask: Tensor | None = None

    def at(self, part: slice) -> LogitsRows:
        mask = None if self.mask is None else self.mask[part]
        return LogitsRows(self.rows[part], self.lens[part], mask)


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan and its arrays on the device."""

    plan: SamplePlan
    sections: DeviceSections
    prefix: str

    def ints(self, name: str) -> Tensor:
        return self.sections.ints(f"{self.prefix}.{name}")

    def floats(self, name: str) -> Tensor:
        return self.sections.floats(f"{self.prefix}.{name}")


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens int64 [n]; is_sound bool [n], False where no token could be drawn. Of the rows that
    want logprobs: chosen [m], top_ids int64 [m, k], top_logprobs [m, k], all float32. `prompts`
    where a step owes its rows' prompts something."""

    tokens: Tensor
    is_sound: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    prompts: PromptValues | None = None


class Sampler:
    __slots__ = ("_pools", "_tables", "_token_ids")

    def __init__(self, tables: RowTables, pools: KvPools, *, vocab_size: int) -> None:
        self._tables = tables
        self._pools = pools
        self._token_ids = torch.arange(vocab_size, device=pools.token_pool.device)

    def sample(self, logits: Tensor, rows: LogitsRows, staged: Staged) -> Sampled:
        """logits [n, vocab], float32 or float64, may be overwritten."""
        params = self._tables.at(rows.rows, logits.dtype)
        raw = logits.index_select(0, staged.ints("raw"))
        self._process(logits, rows, staged)
        if rows.mask is not None:
            logits.masked_fill_(~_allowed(rows.mask, self._token_ids), -torch.inf)
        if staged.plan.bans is not None:
            outputs = Outputs(rows.rows, rows.lens, params.ints("prompt_len"), self._pools)
            ban(logits, outputs, lambda name: staged.ints(f"bans.{name}"))
        tokens = self._draw(logits, rows, params, staged.plan)
        chosen, top_ids, top_logprobs = _logprobs(logits, raw, tokens, staged)
        return Sampled(
            tokens=tokens,
            # The maximum is NaN if one logit is, and -inf if none is allowed.
            is_sound=logits.amax(dim=1).isfinite(),
            chosen=chosen,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _process(self, logits: Tensor, rows: LogitsRows, staged: Staged) -> None:
        plan = staged.plan
        if len(plan.penalised):
            index = staged.ints("penalised")
            own = rows.rows.index_select(0, index)
            penalised = penalise(
                logits.index_select(0, index),
                self._pools.token_ids(own, max_len=plan.max_len),
                rows.lens.index_select(0, index),
                self._tables.at(own, logits.dtype),
            )
            logits.index_copy_(0, index, penalised)
        if plan.nudges.places:
            places = staged.ints("places")
            is_on = rows.lens.index_select(0, places) < staged.ints("until")
            values = torch.where(is_on, staged.floats("values").to(logits.dtype), 0)
            logits.index_put_((places, staged.ints("token_ids")), values, accumulate=True)

    def _draw(
        self, logits: Tensor, rows: LogitsRows, params: RowParams, plan: SamplePlan
    ) -> Tensor:
        if not plan.needs_noise:
            return logits.argmax(dim=1)
        noise = gumbel_noise(params.ints("seed"), rows.lens, self._token_ids, logits.dtype)
        scaled, noisy = draw(logits, noise, params.floats("temperature"))
        if not plan.needs_filter:
            return noisy.argmax(dim=1)
        probs = scaled.softmax(dim=1)
        limits = set_limits(
            probs,
            top_k=params.ints("top_k"),
            top_p=params.floats("top_p"),
            min_p=params.floats("min_p"),
            max_top_k=plan.max_top_k,
        )
        return choose(scaled, noisy, probs, limits)


def _allowed(mask: Tensor, token_ids: Tensor) -> Tensor:
    """mask int32 [n, words] -> bool [n, vocab]."""
    words = mask.index_select(1, token_ids // 32)
    return ((words >> (token_ids % 32)) & 1).to(torch.bool)


def _logprobs(
    logits: Tensor, raw: Tensor, tokens: Tensor, staged: Staged
) -> tuple[Tensor, Tensor, Tensor]:
    """Of processed logits, or of the model's own where a row wants those; before temperature."""
    index = staged.ints("scored")
    scored = logits.index_select(0, index).index_copy_(0, staged.ints("raw_places"), raw)
    scores = scored.log_softmax(dim=1)
    chosen = scores.gather(1, tokens.index_select(0, index)[:, None])[:, 0]
    top_logprobs, top_ids = scores.topk(staged.plan.num_top, dim=1)
    return chosen.float(), top_ids, top_logprobs.float()
