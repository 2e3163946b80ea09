"""A decode mode for tests whose drafts form a tree, of which mostly a path of scattered nodes is
accepted: the KV of that path is moved together before the step ends.

The drafter is the model itself, two tokens further. Of each pair of siblings the first is wrong.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.models.base import wide_logits
from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, RelayField
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS, DeviceStep, HeldSample
from aserve.gpu.step.results import Packed, pack, pack_one_each
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.executor import DecodeCaps
from aserve.messages.step import DraftTree
from tests.fakes.two_token_mode import one_more

TREE = DraftTree((0, 0, 2, 2))
PATHS = ((0,), (0, 1), (0, 2), (0, 2, 3), (0, 2, 4))  # from the root to each node


class TreeOfDrafts:
    def __init__(self) -> None:
        self.caps = DecodeCaps(max_tokens_per_step=5, tree=TREE)
        self.can_fuse = False
        self.fields: tuple[RelayField, ...] = (
            RelayField(SEQ_LEN, (), torch.int64),
            RelayField(DRAFTS, (4,), torch.int64),
        )
        self.num_forwards = 3
        self.num_draft_forwards = 0
        self.graph_widths: tuple[int, ...] = (1,)
        self.num_moved = 0  # nodes that were accepted out of place

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        pass

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        step = dataclasses.replace(step, batch=_with_tree(step))
        hidden = runner.forward(step.batch)
        runner.hold(step, hidden)
        sampled = runner.sample(step, hidden)
        paths = _accepted(step, sampled.tokens)
        self._move(runner, step, paths)
        counts = torch.tensor([len(path) for path in paths])
        starts = step.plan.logits.windows.cumsum() - step.plan.logits.windows
        tokens = torch.zeros(len(paths), 3, dtype=torch.int64)
        for index, (start, path) in enumerate(zip(starts.tolist(), paths, strict=True)):
            tokens[index, : len(path)] = sampled.tokens[[start + node for node in path]]
        rows = step.arrays.ints("sample_rows")
        by_row = torch.zeros_like(runner.relay.written_iter)
        by_row.index_copy_(0, rows, step.arrays.ints("windows") - counts)
        lens = step.batch.lens - by_row.index_select(0, step.batch.rows)
        publish(lens)
        by_row.index_copy_(0, step.batch.rows, lens)
        last = tokens.gather(1, counts[:, None] - 1)[:, 0]
        drafts = _draft(runner, step, rows, last=last, lens=by_row.index_select(0, rows))
        runner.relay.stash(rows, {LAST_TOKEN: last, DRAFTS: drafts}, iteration=step.iteration)
        return pack(tokens, counts, sampled)

    def sample_held(self, runner: StepRunner, held: HeldSample) -> Packed:
        sampled = runner.sample_held(held)
        runner.relay.stash(held.rows, {LAST_TOKEN: sampled.tokens}, iteration=held.iteration)
        return pack_one_each(sampled)

    def _move(self, runner: StepRunner, step: DeviceStep, paths: list[tuple[int, ...]]) -> None:
        roots = step.arrays.ints("logits_tokens")
        starts = (step.plan.logits.windows.cumsum() - step.plan.logits.windows).tolist()
        moves = [
            (int(roots[start]) + node, int(roots[start]) + depth)
            for start, path in zip(starts, paths, strict=True)
            for depth, node in enumerate(path)
            if node != depth
        ]
        self.num_moved += len(moves)
        sources, targets = torch.tensor(moves, dtype=torch.int64).reshape(-1, 2).unbind(1)
        slots = step.batch.slots
        runner.state.pools.move(
            tuple(group[sources] for group in slots), tuple(group[targets] for group in slots)
        )


def _with_tree(step: DeviceStep) -> ForwardBatch:
    """The step's forward with each draft at the position of its depth, seeing its own path only."""
    batch = step.batch
    width = int(step.plan.query_lens.max(initial=1))
    mask = torch.zeros(batch.num_tokens, width, dtype=torch.bool)
    depths: list[int] = []
    for query_len, num_drafts in zip(step.plan.query_lens, step.plan.num_drafts, strict=True):
        for offset in range(query_len):
            path = PATHS[offset] if num_drafts else tuple(range(offset + 1))
            mask[len(depths), list(path)] = True
            depths.append(len(path) - 1)
    starts = batch.kv_lens.index_select(0, batch.token_to_row)
    positions = starts + torch.tensor(depths, dtype=torch.int64)
    overrides = ForwardOverrides(rope_positions=positions, tree_mask=mask)
    return batch.overridden(overrides, is_debug=batch.is_debug)


def _accepted(step: DeviceStep, sampled: Tensor) -> list[tuple[int, ...]]:
    """For each sampled row the path of nodes, from its root on, that were sampled."""
    ids = step.batch.input_ids.index_select(0, step.arrays.ints("logits_tokens")).tolist()
    tokens, start = sampled.tolist(), 0
    paths: list[tuple[int, ...]] = []
    for window in step.plan.logits.windows.tolist():
        path: tuple[int, ...] = (0,)
        for node in range(1, window):
            follows = TREE.parents[node - 1] == path[-1]
            if follows and ids[start + node] == tokens[start + path[-1]]:
                path = (*path, node)
        paths.append(path)
        start += window
    return paths


def _draft(
    runner: StepRunner, step: DeviceStep, rows: Tensor, *, last: Tensor, lens: Tensor
) -> Tensor:
    """-> [n, 4]: two guesses after each other, and a wrong one before each."""
    first = _guess(runner, step, rows, last=last, lens=lens)
    second = _guess(runner, step, rows, last=first, lens=lens + 1)
    wrong = [(token + 1).remainder(runner.model.vocab_size) for token in (first, second)]
    return torch.stack((wrong[0], first, wrong[1], second), dim=1)


def _guess(
    runner: StepRunner, step: DeviceStep, rows: Tensor, *, last: Tensor, lens: Tensor
) -> Tensor:
    batch = one_more(step, rows, last=last, lens=lens)
    logits = wide_logits(runner.model.logits(runner.forward(runner.init_forward(batch))))
    params = runner.state.tables.at(rows, logits.dtype)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(params.ints("seed"), lens + 1, token_ids, logits.dtype)
    return (logits + noise * params.floats("temperature")[:, None]).argmax(dim=1)
