"""The result of a step: packed on the device into one int32 array, and read on the host.

`pack` runs on the executor's stream. The readers run on the waiter's thread, after the step's
event. Host values alone fix the layout, so the reader asks the device nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.errors import AserveError, BugError, StepError
from aserve.gpu.sampling.sampler import Sampled
from aserve.gpu.step.plan import LogitsPlan, StepPlan
from aserve.gpu.step.prompts import PromptPlan, Prompts, read_prompts
from aserve.messages.base import ArrayI32
from aserve.messages.results import RowLogprobs, SampleResult, SeqLens, StepResult


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of the sections of a packed result."""

    num_samples: int  # rows; 0 for a step that gives no tokens
    width: int  # the most tokens that a row may get
    num_logits: int
    num_scored: int  # logits rows with logprobs
    num_top: int
    num_prompt_words: int
    num_draft_words: int = 0
    max_drafts: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of tokens, counts, is_valid, chosen, top_ids, top_logprobs, prompts and drafts."""
        table = self.num_scored * self.num_top
        tokens = self.num_samples * self.width
        sampled = tokens, self.num_samples, self.num_logits, self.num_scored, table, table
        return *sampled, self.num_prompt_words, self.num_draft_words


@dataclass(frozen=True, slots=True)
class Packed:
    """`words`: int32 [sum of the layout's sizes], and in debug mode the checks after them."""

    words: Tensor
    layout: Layout

    def with_drafts(self, *tables: Tensor) -> Packed:
        """Appends the drafts of held rows: tables int64 [held, max drafts], of tokens, and of
        parents in a tree."""
        words = [self.words, *(table.reshape(-1).to(torch.int32) for table in tables)]
        num_words, max_drafts = sum(map(len, words[1:])), tables[0].shape[1]
        layout = dataclasses.replace(self.layout, num_draft_words=num_words, max_drafts=max_drafts)
        return Packed(torch.cat(words), layout)

    def with_checks(self, *checks: Tensor) -> Packed:
        """Appends the values that `check_step` reads."""
        return Packed(
            torch.cat([self.words, *(values.to(torch.int32) for values in checks)]), self.layout
        )


def pack(tokens: Tensor, counts: Tensor, sampled: Sampled) -> Packed:
    """tokens int64 [samples, width]: row i gets the first counts[i] of its tokens, which may be
    none. counts int64 [samples]. Floats keep their bits.
    """
    values = (
        tokens,
        counts,
        sampled.is_valid,
        sampled.chosen.view(torch.int32),
        sampled.top_ids,
        sampled.top_logprobs.contiguous().view(torch.int32),
        *(() if sampled.prompts is None else (sampled.prompts,)),
    )
    num_samples, width = tokens.shape
    num_scored, num_top = sampled.top_ids.shape
    layout = Layout(
        num_samples=num_samples,
        width=width,
        num_logits=len(sampled.is_valid),
        num_scored=num_scored,
        num_top=num_top,
        num_prompt_words=0 if sampled.prompts is None else len(sampled.prompts),
    )
    return Packed(torch.cat([value.reshape(-1).to(torch.int32) for value in values]), layout)


def pack_one_each(sampled: Sampled) -> Packed:
    """Packs the result of a step in which every sampled row gets one token."""
    return pack(sampled.tokens[:, None], torch.ones_like(sampled.tokens), sampled)


def pack_nothing(device: torch.device) -> Packed:
    """Packs the result of a step without tokens, such as that of a middle stage of a pipeline."""
    return Packed(
        torch.empty(0, dtype=torch.int32, device=device),
        Layout(0, 0, 0, num_scored=0, num_top=0, num_prompt_words=0),
    )


def read_step(
    words: ArrayI32, layout: Layout, logits: LogitsPlan, prompts: PromptPlan | None, iteration: int
) -> StepResult | AserveError:
    """words: a packed result, int32, on the host. Padding rows, which come last, are dropped. A row
    that cannot be sampled is an error.
    """
    ends = list(itertools.accumulate(layout.sizes))
    rows = logits.rows[: layout.num_samples]
    tokens = words[: ends[0]].reshape(layout.num_samples, layout.width)[: len(rows)]
    counts = words[ends[0] : ends[1]][: len(rows)]
    is_valid = words[ends[1] : ends[2]][: len(logits.tokens)]
    if np.count_nonzero(is_valid) < len(is_valid):
        row = int(np.repeat(logits.rows, logits.windows)[np.flatnonzero(is_valid == 0)[0]])
        return StepError(f"row {row}: no token can be drawn from its logits (NaN, or all banned)")
    read = Prompts()
    if prompts is not None and layout.num_prompt_words:
        found = read_prompts(words[ends[5] : ends[6]], prompts)
        if isinstance(found, StepError):
            return found
        read = found
    is_emitted = np.arange(layout.width) < counts[:, None]
    scores = words[ends[2] : ends[5]]
    return StepResult(
        iteration=iteration,
        rows=rows.tobytes(),
        counts=counts.tobytes(),
        tokens=tokens[is_emitted].tobytes(),
        logprobs=_read_logprobs(scores, layout, logits, counts) if layout.num_scored else (),
        prompt_logprobs=read.logprobs,
        embeddings=read.embeddings,
    )


def read_sample(
    words: ArrayI32, layout: Layout, logits: LogitsPlan, iteration: int
) -> SampleResult | AserveError:
    """Does what `read_step` does for held rows, whose step has already answered for prompts."""
    read = read_step(words, layout, logits, None, iteration)
    if isinstance(read, AserveError):
        return read
    return SampleResult(iteration, read.rows, read.counts, read.tokens, read.logprobs)


def check_step(plan: StepPlan, stamps: ArrayI32, kv_lens: ArrayI32) -> BugError | None:
    """The debug checks: each relay read found the value of the step that it expected, and each KV
    length of the host is the device's own."""
    is_stale = (plan.expects != 0) & (stamps != plan.expects)
    if is_stale.any():
        index = int(np.flatnonzero(is_stale)[0])
        return BugError(
            f"step {plan.iteration}: row {plan.rows[index]} reads the relay of step "
            f"{plan.expects[index]}, but step {stamps[index]} wrote it"
        )
    is_wrong = np.where(plan.is_bound > 0, kv_lens > plan.kv_lens, kv_lens != plan.kv_lens)
    if is_wrong.any():
        index = int(np.flatnonzero(is_wrong)[0])
        kind = "at most" if plan.is_bound[index] else "exactly"
        return BugError(
            f"step {plan.iteration}: row {plan.rows[index]} has {kv_lens[index]} KV positions on "
            f"the device; the host says {kind} {plan.kv_lens[index]}"
        )
    return None


def seq_lens(plan: StepPlan, lens: ArrayI32) -> SeqLens:
    return SeqLens(
        iteration=plan.iteration, rows=plan.rows.tobytes(), lens=lens.astype(np.int32).tobytes()
    )


def _read_logprobs(
    words: ArrayI32, layout: Layout, logits: LogitsPlan, counts: ArrayI32
) -> tuple[RowLogprobs, ...]:
    """Returns the logprobs of each row's emitted tokens, with as many alternatives as it asked for.
    `words` has those of all logits rows that want some, one after the other.
    """
    chosen, tables = words[: layout.num_scored], words[layout.num_scored :]
    top_ids, top_logprobs = tables.reshape(2, layout.num_scored, layout.num_top)
    found: list[RowLogprobs] = []
    start = 0
    for index in np.flatnonzero(logits.num_logprobs[: len(counts)] >= 0):
        part, num_top = slice(start, start + int(counts[index])), int(logits.num_logprobs[index])
        values = (chosen[part], top_ids[part, :num_top], top_logprobs[part, :num_top])
        found.append(RowLogprobs(int(logits.rows[index]), *(each.tobytes() for each in values)))
        start += int(logits.windows[index])
    return tuple(found)
