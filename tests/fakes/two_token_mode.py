"""A decode mode for tests: each step verifies one draft and makes the next, of which many are
wrong.

It drives what only speculation uses: verify windows, lengths that are bounds, publishing before a
step ends, and several forwards in one step. The drafter is the model itself, one token further,
without penalties; every other position it takes a wrong token on purpose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.models.base import wide_logits
from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve.gpu.sampling.sampler import Sampled
from aserve.gpu.spec.base import DraftRows
from aserve.gpu.step.forward_batch import DeviceBatch
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, RelayField
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS, DeviceStep, HeldSample
from aserve.gpu.step.results import Packed, pack, pack_one_each
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.executor import DecodeCaps


class TwoTokens:
    """`before_draft` runs on the executor's thread between publish and the drafter's forward."""

    num_forwards = 2
    num_draft_forwards = 2

    def __init__(self, before_draft: Callable[[], None] = lambda: None) -> None:
        self.caps = DecodeCaps(max_tokens_per_step=2)
        self.can_fuse = False
        self.fields: tuple[RelayField, ...] = (
            RelayField(SEQ_LEN, (), torch.int64),
            RelayField(DRAFTS, (1,), torch.int64),
        )
        self.graph_widths: tuple[int, ...] = (1, 2)
        self.hidden: Tensor | None = None  # of the step that runs
        self._before_draft = before_draft

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        pass

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        hidden = self.hidden = runner.forward(step.batch)
        runner.hold(step, hidden)
        sampled = runner.sample(step, hidden)
        tokens, counts = verify(step, sampled)
        rows = step.arrays.ints("sample_rows")
        ends = step.batch.kv_lens + step.batch.query_lens
        by_row = torch.zeros_like(runner.relay.written_iter)
        by_row.index_copy_(0, rows, step.arrays.ints("windows") - counts)
        lens = ends - by_row.index_select(0, step.batch.rows)  # without what was rejected
        publish(lens)
        self._before_draft()
        last = tokens.gather(1, counts[:, None] - 1)[:, 0]
        by_row.index_copy_(0, step.batch.rows, lens)
        drafts = self.guess(runner, step, rows, last=last, lens=by_row.index_select(0, rows))
        runner.relay.stash(
            rows, {LAST_TOKEN: last, DRAFTS: drafts[:, None]}, iteration=step.iteration
        )
        return pack(tokens, counts, sampled)

    def sample_held(self, runner: StepRunner, held: HeldSample) -> Packed:
        """Rows with a mask get no drafts: the scheduler gives them no window."""
        sampled = runner.sample_held(held)
        runner.relay.stash(held.rows, {LAST_TOKEN: sampled.tokens}, iteration=held.iteration)
        return pack_one_each(sampled)

    def guess(
        self, runner: StepRunner, step: DeviceStep, rows: Tensor, *, last: Tensor, lens: Tensor
    ) -> Tensor:
        """rows, last, lens int64 [n] -> the guessed token after `last`, int64 [n]."""
        batch = one_more(step, rows, last=last, lens=lens)
        logits = runner.model.logits(runner.forward(runner.init_forward(batch)))
        guess = sample(runner, logits, rows, lens)
        return (guess + lens.remainder(2)).remainder(logits.shape[1])


def one_more(step: DeviceStep, rows: Tensor, *, last: Tensor, lens: Tensor) -> DeviceBatch:
    """A forward of one more token of each of the rows."""
    max_len = int(step.plan.len_bounds.max()) + 1
    drafting = DraftRows(step.plan.iteration, rows, lens, last, 1, max_len, needs_noise=True)
    return drafting.tokens_at(0, last)


def sample(runner: StepRunner, logits: Tensor, rows: Tensor, lens: Tensor) -> Tensor:
    """logits [n, vocab] -> int64 [n]: as the sampler draws, without penalties."""
    logits = wide_logits(logits)
    params = runner.state.tables.at(rows, logits.dtype)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(params.ints("seed"), lens + 1, token_ids, logits.dtype)
    return (logits + noise * params.floats("temperature")[:, None]).argmax(dim=1)


def verify(step: DeviceStep, sampled: Sampled) -> tuple[Tensor, Tensor]:
    """-> tokens [samples, 2], counts [samples]: the root's token, and the next one if the draft is
    what was sampled in its place."""
    windows = step.arrays.ints("windows")
    ends = windows.cumsum(0)
    first = sampled.tokens.index_select(0, ends - windows)
    second = sampled.tokens.index_select(0, ends - 1)
    in_draft_place = step.arrays.ints("logits_tokens").index_select(0, ends - 1)
    is_accepted = (windows == 2) & (step.batch.input_ids.index_select(0, in_draft_place) == first)
    return torch.stack((first, second), dim=1), 1 + is_accepted.to(torch.int64)
