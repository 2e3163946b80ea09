"""What comes back of a step: packed on the device into one int32 array, read on the host.

It knows no thread. `pack` runs on the executor's stream, `read` on the waiter's thread, after the
step's event; the layout is fixed by host values, so nothing has to be asked of the device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.errors import AserveError, BugError, StepError
from aserve.gpu.sampling.sampler import Sampled
from aserve.gpu.step.plan import LogitsPlan, StepPlan
from aserve.gpu.step.prompt_plan import PromptPlan
from aserve.gpu.step.prompts import Prompts, read_prompts
from aserve.messages.base import ArrayI32
from aserve.messages.results import RowLogprobs, SampleResult, SeqLens, StepResult


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step gives its sampled rows: tokens int64 [samples, width], of which the first
    `counts` int64 [samples] are emitted."""

    tokens: Tensor
    counts: Tensor
    sampled: Sampled


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the sections, in order."""

    num_samples: int
    width: int  # tokens per sampled row at most
    num_logits: int
    num_scored: int
    num_top: int
    num_prompt_words: int

    @property
    def sizes(self) -> tuple[int, ...]:
        table = self.num_scored * self.num_top
        tokens = self.num_samples * self.width
        of_samples = tokens, self.num_samples, self.num_logits, self.num_scored, table, table
        return *of_samples, self.num_prompt_words


@dataclass(frozen=True, slots=True)
class Packed:
    """`words`: int32 [sum of the layout's sizes, and the checks' lengths after them]."""

    words: Tensor
    layout: Layout


def _layout_of(emitted: Emitted) -> Layout:
    num_samples, width = emitted.tokens.shape
    num_scored, num_top = emitted.sampled.top_ids.shape
    prompts = emitted.sampled.prompts
    return Layout(
        num_samples=num_samples,
        width=width,
        num_logits=len(emitted.sampled.is_valid),
        num_scored=num_scored,
        num_top=num_top,
        num_prompt_words=0 if prompts is None else len(prompts),
    )


def pack(emitted: Emitted, checks: tuple[Tensor, ...] = ()) -> Packed:
    """Floats keep their bits."""
    sampled = emitted.sampled
    values = (
        emitted.tokens,
        emitted.counts,
        sampled.is_valid,
        sampled.chosen.view(torch.int32),
        sampled.top_ids,
        sampled.top_logprobs.contiguous().view(torch.int32),
        *(() if sampled.prompts is None else (sampled.prompts,)),
        *checks,
    )
    words = torch.cat([value.reshape(-1).to(torch.int32) for value in values])
    return Packed(words, _layout_of(emitted))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of the sampled rows, on the host; `rows` and `windows` as they were planned. A Sample owes
    no prompt anything.
    """

    rows: ArrayI32
    counts: ArrayI32
    tokens: ArrayI32  # the emitted ones
    logprobs: tuple[RowLogprobs, ...]
    prompts: Prompts

    def step_result(self, iteration: int) -> StepResult:
        return StepResult(
            iteration=iteration,
            rows=self.rows.tobytes(),
            counts=self.counts.tobytes(),
            tokens=self.tokens.tobytes(),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompts.logprobs,
            embeddings=self.prompts.embeddings,
        )

    def sample_result(self, iteration: int) -> SampleResult:
        return SampleResult(
            iteration=iteration,
            rows=self.rows.tobytes(),
            counts=self.counts.tobytes(),
            tokens=self.tokens.tobytes(),
            logprobs=self.logprobs,
        )


def read_tokens(
    words: ArrayI32, layout: Layout, logits: LogitsPlan, prompt_plan: PromptPlan | None = None
) -> Tokens | AserveError:
    """words: a packed array, int32, of which padding rows, the last ones, fall away here. A row
    that could not be sampled is an error.
    """
    ends = list(itertools.accumulate(layout.sizes, initial=0))
    tokens, counts, is_valid, chosen, top_ids, top_logprobs, of_prompts = (
        words[start:end] for start, end in itertools.pairwise(ends)
    )
    tokens = tokens.reshape(layout.num_samples, layout.width)[: len(logits.rows)]
    counts, is_valid = counts[: len(logits.rows)], is_valid[: len(logits.tokens)]
    if not is_valid.all():
        row = int(np.repeat(logits.rows, logits.windows)[np.flatnonzero(is_valid == 0)[0]])
        return StepError(f"row {row}: no token can be drawn from its logits (NaN, or all banned)")
    prompts = Prompts() if prompt_plan is None else read_prompts(of_prompts, prompt_plan)
    if isinstance(prompts, StepError):
        return prompts
    is_emitted = np.arange(layout.width) < counts[:, None]
    scores = _Scores(
        chosen.view(np.float32),
        top_ids.reshape(layout.num_scored, layout.num_top),
        top_logprobs.view(np.float32).reshape(layout.num_scored, layout.num_top),
    )
    return Tokens(
        rows=logits.rows,
        counts=counts.copy(),
        tokens=tokens[is_emitted],
        logprobs=tuple(scores.by_row(logits, counts)),
        prompts=prompts,
    )


def check_step(plan: StepPlan, stamps: ArrayI32, kv_lens: ArrayI32) -> BugError | None:
    """The debug checks: relay reads met the step that they expected, lengths those of the host."""
    is_stale = (plan.expects != 0) & (stamps != plan.expects)
    if is_stale.any():
        place = int(np.flatnonzero(is_stale)[0])
        return BugError(
            f"step {plan.iteration}: row {plan.rows[place]} reads the relay of step "
            f"{plan.expects[place]}, but step {stamps[place]} wrote it"
        )
    is_wrong = np.where(plan.is_bound > 0, kv_lens > plan.kv_lens, kv_lens != plan.kv_lens)
    if is_wrong.any():
        place = int(np.flatnonzero(is_wrong)[0])
        kind = "at most" if plan.is_bound[place] else "exactly"
        return BugError(
            f"step {plan.iteration}: row {plan.rows[place]} has {kv_lens[place]} KV positions on "
            f"the device; the host says {kind} {plan.kv_lens[place]}"
        )
    return None


def seq_lens(plan: StepPlan, lens: ArrayI32) -> SeqLens:
    return SeqLens(
        iteration=plan.iteration, rows=plan.rows.tobytes(), lens=lens.astype(np.int32).tobytes()
    )


@dataclass(frozen=True, slots=True)
class _Scores:
    """Of all logits rows that want logprobs, one after the other."""

    chosen: np.ndarray[tuple[int], np.dtype[np.float32]]
    top_ids: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    top_logprobs: np.ndarray[tuple[int, int], np.dtype[np.float32]]

    def by_row(self, logits: LogitsPlan, counts: ArrayI32) -> list[RowLogprobs]:
        """Of each row's window only what was emitted, and as many alternatives as it asked for."""
        found: list[RowLogprobs] = []
        start = 0
        for place in np.flatnonzero(logits.num_logprobs >= 0):
            part = slice(start, start + int(counts[place]))
            num_top = int(logits.num_logprobs[place])
            found.append(
                RowLogprobs(
                    row=int(logits.rows[place]),
                    chosen=self.chosen[part].tobytes(),
                    top_ids=self.top_ids[part, :num_top].tobytes(),
                    top_logprobs=self.top_logprobs[part, :num_top].tobytes(),
                )
            )
            start += int(logits.windows[place])
        return found
