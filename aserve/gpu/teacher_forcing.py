"""Checks generated tokens by teacher forcing: one prefill over a prompt and its outputs gives the
logits of every output position, so all tokens are checked at once instead of decoded again.

A token is as expected if the sampler draws it again at its position. Where it draws another one,
the `Difference` says by how much, and whether rounding alone can explain it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.sampling.draw import add_noise, draw_tokens
from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve.gpu.sampling.ops import SampleOps
from aserve.gpu.sampling.params import LogitsRows, RowTables
from aserve.gpu.sampling.plan import RowParams, SamplePlan
from aserve.gpu.sampling.sampler import Sampler, Staged
from aserve.gpu.sampling.top_k_top_p import choose_sorted
from aserve.gpu.step.future_map import LAST_TOKEN
from aserve.gpu.step.held import HeldSample
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.step.results import Packed, pack_one_each
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import ArrayI32

SLICE_LEN = 64  # output positions whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class Difference:
    """A position at which another token is drawn. `gap` is by how much the drawn token's logit,
    with its noise times the temperature, is above that of the expected one; infinite if the
    expected token could not be drawn at all.
    """

    position: int  # in the output
    expected: int
    drawn: int
    gap: float
    is_rounding: bool


@dataclass(slots=True)
class Outcome:
    """`surprise` sums, over the positions, how much less likely the tokens are than tokens of the
    model's distribution are on average, and `variance` is that of the sum.
    """

    num_checked: int = 0
    differences: list[Difference] = field(default_factory=list)
    surprise: float = 0.0
    variance: float = 0.0

    def note(self, difference: Difference) -> None:
        self.differences.append(difference)

    def add_surprise(
        self, logits: Tensor, rows: LogitsRows, tables: RowTables, token_ids: Tensor
    ) -> None:
        """logits [n, vocab], token_ids int64 [n]. Greedy positions have none."""
        temperature = tables.at(rows.rows, logits.dtype).floats("temperature").double()
        is_drawn = temperature > 0
        logprobs = (logits[is_drawn].double() / temperature[is_drawn, None]).log_softmax(1)
        probs = logprobs.exp()
        finite = logprobs.where(probs > 0, 0)
        mean = (probs * finite).sum(1)
        chosen = logprobs.gather(1, token_ids.to(logits.device)[is_drawn, None])[:, 0]
        self.surprise += float((mean - chosen).sum())
        self.variance += float(((probs * finite.square()).sum(1) - mean.square()).sum())

    @property
    def is_plausible(self) -> bool:
        """Whether the tokens look like a draw of this model, if maybe with another seed."""
        return abs(self.surprise) <= 4 * math.sqrt(self.variance) + 1e-6


@dataclass(frozen=True, slots=True)
class Expected:
    """One sequence: where its outputs begin, and what they are."""

    prompt_len: int
    token_ids: ArrayI32  # [outputs]
    masks: ArrayI32 | None = None  # [outputs, mask words], of a grammar
    tolerance: float = 0.0  # by how much rounding may change a logit


class TeacherForcing:
    """A decode mode for an engine of one row, whose outputs come with its prompt. It checks every
    output position of the tokens that a step computes, and otherwise does what Autoregressive does.
    """

    __slots__ = (
        *("_expected", "_plain", "_row_params", "outcome"),
        *("caps", "can_fuse", "fields", "graph_widths", "num_draft_forwards", "num_forwards"),
    )

    def __init__(self) -> None:
        self._plain = Autoregressive()
        self.caps = self._plain.caps
        self.can_fuse = False  # a fused step has no hidden states to check
        self.fields = self._plain.fields
        self.graph_widths = self._plain.graph_widths
        self.num_forwards = 1
        self.num_draft_forwards = 0
        self.outcome = Outcome()
        self._row_params = RowParams(1)
        self._expected = Expected(0, np.empty(0, np.int32))

    def expect(self, expected: Expected) -> None:
        self._expected = expected
        self.outcome = Outcome()

    def taken(self) -> Outcome:
        """Returns the outcome, and begins an empty one."""
        taken, self.outcome = self.outcome, Outcome()
        return taken

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        pass

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        self._row_params.write(step.plan.batch.row_inits)
        hidden = runner.forward(step.batch)
        runner.hold(step, hidden)
        self._check(runner, step, hidden)
        sampled = runner.sample(step, hidden)
        rows = step.arrays.ints("sample_rows")
        runner.relay.stash(rows, {LAST_TOKEN: sampled.tokens}, iteration=step.iteration)
        return pack_one_each(sampled)

    def sample_held(self, runner: StepRunner, held: HeldSample, publish: OnPublish) -> Packed:
        return self._plain.sample_held(runner, held, publish)

    def _check(self, runner: StepRunner, step: DeviceStep, hidden: Tensor) -> None:
        """hidden [tokens, hidden]. The logits of a token decide the one after it."""
        first = int(step.plan.kv_lens[0]) + 1 - self._expected.prompt_len  # its output, from 0
        num_tokens = len(step.plan.input_ids)
        end = min(first + num_tokens, len(self._expected.token_ids))
        for start in range(max(first, 0), end, SLICE_LEN):
            outputs = slice(start, min(start + SLICE_LEN, end))
            part = slice(outputs.start - first, outputs.stop - first)
            self._check_slice(runner, step, runner.model.logits(hidden[part]), outputs)

    def _check_slice(
        self, runner: StepRunner, step: DeviceStep, logits: Tensor, outputs: slice
    ) -> None:
        """logits [n, vocab] of these outputs."""
        num = len(logits)
        rows = np.full(num, step.plan.rows[0], np.int32)
        max_len = int(step.plan.len_bounds.max())
        plan = self._row_params.plan(rows, max_len=max_len, vocab_size=logits.shape[1])
        arrays = HostArrays()
        plan.stage(arrays, "check")
        words = np.zeros(arrays.num_words, np.int32)
        places = arrays.write(words)
        device = logits.device
        staged = DeviceArrays(torch.from_numpy(words).to(device), places)
        first_len = self._expected.prompt_len + outputs.start
        masks = self._expected.masks
        sampler = Sampler(
            runner.state.tables,
            runner.state.pools,
            SampleOps(draw=functools.partial(self._draw, outputs)),
        )
        sampler.sample(
            logits,
            LogitsRows(
                torch.from_numpy(rows).to(device, torch.int64),
                torch.arange(first_len, first_len + num, device=device),
                None if masks is None else torch.from_numpy(masks[outputs]).to(device),
            ),
            Staged(plan, staged, "check"),
        )

    def _draw(
        self, outputs: slice, logits: Tensor, rows: LogitsRows, tables: RowTables, plan: SamplePlan
    ) -> tuple[Tensor, Tensor]:
        """Draws as a step does, and compares with what is expected of these outputs."""
        tokens, is_valid = draw_tokens(logits, rows, tables, plan, by=choose_sorted)
        expected = self._expected.token_ids[outputs]
        self.outcome.num_checked += len(expected)
        drawn = tokens.to("cpu").numpy()  # NOTE: this waits for the device; nobody is served here
        for index in np.flatnonzero(drawn != expected):
            scores = Scores.of(logits, rows, tables, index=int(index))
            self.outcome.note(
                Difference(
                    position=outputs.start + int(index),
                    expected=int(expected[index]),
                    drawn=int(drawn[index]),
                    gap=scores.gap(int(expected[index]), int(drawn[index])),
                    is_rounding=scores.is_rounding(int(expected[index]), self._expected.tolerance),
                )
            )
        self.outcome.add_surprise(logits, rows, tables, torch.from_numpy(expected))
        return tokens, is_valid


@dataclass(frozen=True, slots=True)
class Scores:
    """The logits of one position, after penalties, biases and masks, and its sampling parameters.

    With the temperature T > 0 the token with the largest `logits / T + noise` is drawn among those
    that pass the filters; `noisy` is that sum times T, so a rounding error of the logits is one of
    `noisy`.
    """

    logits: Tensor  # float64 [vocab]
    noisy: Tensor  # float64 [vocab]
    temperature: float
    limits: tuple[int, float, float]  # top_k (0: off), top_p, min_p

    @classmethod
    def of(cls, logits: Tensor, rows: LogitsRows, tables: RowTables, *, index: int) -> Scores:
        one = slice(index, index + 1)
        row = rows.at(one)
        params = tables.at(row.rows, logits.dtype)
        temperature = params.floats("temperature")
        ids = torch.arange(logits.shape[1], device=logits.device)
        noise = gumbel_noise(params.ints("seed"), row.lens, ids, logits.dtype)
        scaled, noisy = add_noise(logits[one], noise, temperature)
        factor = float(temperature) or 1.0
        limits = int(params.ints("top_k")), float(params.floats("top_p"))
        return cls(
            scaled[0].double() * factor,
            noisy[0].double() * factor,
            float(temperature),
            (*limits, float(params.floats("min_p"))),
        )

    def gap(self, expected: int, drawn: int) -> float:
        return float(self.noisy[drawn] - self.noisy[expected])

    def is_rounding(self, expected: int, tolerance: float) -> bool:
        """Whether `expected` would be drawn from some logits within `tolerance` of these: it may
        pass the filters, and no token that surely passes them is surely above it.
        """
        if not tolerance or not self.logits[expected].isfinite():
            return False
        is_above = self.noisy > self.noisy[expected] + 2 * tolerance
        if self.temperature == 0 or self.limits == (0, 1.0, 0.0):
            return not bool(is_above.any())
        may_pass, surely_passes = self._passing(tolerance)
        return bool(may_pass[expected]) and not bool((is_above & surely_passes).any())

    def _passing(self, tolerance: float) -> tuple[Tensor, Tensor]:
        """Which tokens pass the filters with some, and with all logits within the tolerance: bool
        [vocab] each. See top_k_top_p.py for the filters.
        """
        top_k, top_p, min_p = self.limits
        vocab_size = len(self.logits)
        kept = top_k if 0 < top_k < vocab_size else vocab_size
        factor = math.exp(2 * tolerance / self.temperature)  # of a ratio of two probabilities
        probs = (self.logits / self.temperature).softmax(0)
        ranked = probs.sort(descending=True).values
        sums = torch.cat([ranked.new_zeros(1), ranked.cumsum(0)])
        # Ascending bounds, so that counts of better tokens are found by bisection.
        ascending = -ranked
        fewest = torch.searchsorted(ascending, -probs * factor, right=True)
        most = torch.searchsorted(ascending, -probs / factor, right=True) - 1
        mass = math.inf if top_p >= 1 else top_p * float(sums[kept])
        floor = min_p * float(ranked[0])
        may = (fewest < kept) & (sums[fewest] / factor < mass) & (probs * factor >= floor)
        surely = (most < kept) & (sums[most] * factor < mass) & (probs / factor >= floor)
        return may, surely
