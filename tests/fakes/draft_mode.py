"""A target with a second model beside it: a draft of one layer with KV pools of its own.

The target's logits depend on its first layer alone, so a drafter that has this layer, and whose own
KV is right, guesses every token. Its guesses show in how many steps a request takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.models.base import Attend, wide_logits
from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, RelayField
from aserve.gpu.step.resolve import DRAFTS, DeviceStep, HeldSample
from aserve.gpu.step.results import Packed, pack, pack_one_each
from aserve.messages.executor import DecodeCaps
from tests.fakes.hash_model import HEAD_DIM, NUM_HEADS, HashModel
from tests.fakes.two_token_mode import verify

FIRST_READ = NUM_HEADS * HEAD_DIM  # features of the first layer


class ShallowTarget(HashModel):
    """Two layers, of which the head reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self._head[FIRST_READ:] = 0


class OneLayerDraft(HashModel):
    """The first layer of ShallowTarget, and its head. Notes the shapes of the hidden states that it
    was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.layers[:1]
        self._head = self._head[:FIRST_READ]
        self.hidden_shapes: list[tuple[int, ...]] = []

    def forward(  # type: ignore[override]  # a drafter takes hidden states instead of a capture
        self, input_ids: Tensor, positions: Tensor, attend: Attend, *, hidden: Tensor | None = None
    ) -> Tensor:
        if hidden is not None:
            self.hidden_shapes.append((len(input_ids), *hidden.shape))
        return super().forward(input_ids, positions, attend)


class DraftsWithSecondModel:
    """Verifies one draft per row and step, and lets the drafter make the next one."""

    def __init__(self) -> None:
        self.caps = DecodeCaps(max_tokens_per_step=2)
        self.draws_once = False
        self.fields: tuple[RelayField, ...] = (
            RelayField(SEQ_LEN, (), torch.int64),
            RelayField(DRAFTS, (1,), torch.int64),
        )
        self.num_forwards = 1  # of the target
        self.graph_widths: tuple[int, ...] = (1, 2)

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        hidden = runner.forward(step.batch)
        runner.hold(step, hidden)
        sampled = runner.sample(step, hidden)
        tokens, counts = verify(step, sampled)
        rows = step.arrays.ints("sample_rows")
        by_row = torch.zeros_like(runner.relay.written_iter)
        by_row.index_copy_(0, rows, step.arrays.ints("windows") - counts)
        lens = step.batch.lens - by_row.index_select(0, step.batch.rows)
        publish(lens)
        runner.draft(step.batch, hidden)  # writes the drafter's KV of the step's tokens
        by_row.index_copy_(0, step.batch.rows, lens)
        last = tokens.gather(1, counts[:, None] - 1)[:, 0]
        drafts = _draft(runner, step, rows, last=last, lens=by_row.index_select(0, rows))
        runner.relay.stash(
            rows, {LAST_TOKEN: last, DRAFTS: drafts[:, None]}, iteration=step.iteration
        )
        return pack(tokens, counts, sampled)

    def sample_held(self, runner: StepRunner, held: HeldSample) -> Packed:
        sampled = runner.sample_held(held)
        runner.relay.stash(held.rows, {LAST_TOKEN: sampled.tokens}, iteration=held.iteration)
        return pack_one_each(sampled)


def _draft(
    runner: StepRunner, step: DeviceStep, rows: Tensor, *, last: Tensor, lens: Tensor
) -> Tensor:
    assert runner.drafter is not None
    batch = runner.init_forward(step.batch.decode(rows, input_ids=last, kv_lens=lens))
    logits = wide_logits(runner.drafter.logits(runner.draft(batch)))
    params = runner.state.tables.at(rows, logits.dtype)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(params.ints("seed"), lens + 1, token_ids, logits.dtype)
    return (logits + noise * params.floats("temperature")[:, None]).argmax(dim=1)
