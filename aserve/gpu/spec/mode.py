"""`Speculative`: the decode mode that verifies the drafts of a drafter."""

# Theory of operation
#
# A row's decode computes a window of tokens: its last known token, the root, and some drafts of
# what follows. One step of a row with KV length L:
#
#   draft    the drafter guesses tokens behind the root, from what it left in the relay, and may
#            write its own KV at L and after; the guesses go into the relay, for resolve
#   forward  the target computes the window at positions L, L + 1, ... (in a tree: L + depth)
#   sample   the sampler draws a token for every node, with the noise of its position
#   verify   the longest path whose tokens are what was drawn before them is accepted: A drafts. The
#            row emits A + 1 tokens, and has L + A + 1 positions of KV, the root's included
#   compact  in a tree, the KV of the accepted path is moved right behind the root
#   publish  the new length is known on the device, and its copy to the host begins
#   extend   the drafter computes its KV of the step's tokens from the target's hidden states
#   stash    the last emitted token, which is the next root, and the drafter's fields
#
# A prefill, a chunk and a row without drafts are windows of one token, so one step mixes all kinds.
# The drafter extends over every token of the step, rejected ones included, which keeps shapes
# fixed: what it writes behind the new length is overwritten by the next window, as the target's KV
# is.
#
# Alignment. The KV that a drafter with hidden states keeps for position i is made of the target's
# hidden state at i and of token i + 1, and predicts token i + 2. Token i + 1 is the next token of
# the prompt, or what was drawn at i: up to the accepted length these are the emitted tokens,
# without looking at what was accepted. So the KV of a page depends on one token after it
# (`key_lookahead`).
#
# To await the result of each step, and to plan the next step from bounds, are the same code with
# other numbers: (depth, lead) = (1, 1) and (2, 2).

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.decode.base import OnPublish, StepRunner
from aserve.gpu.device.fused_step import FusedDecoder, FusedStep
from aserve.gpu.device.ops import MakeFusedDraft
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.sampling.ops import SampleOps
from aserve.gpu.sampling.sampler import Sampled
from aserve.gpu.spec.base import Drafter, DraftRows, Verified, widened
from aserve.gpu.spec.fused import FuseDrafter, FusedSpeculation
from aserve.gpu.spec.rejection import Verification
from aserve.gpu.spec.tree import DraftTrees, TreeOfStep
from aserve.gpu.spec.verify import (
    Accepted,
    Windows,
    accept_chain,
    accept_tree,
    compact,
    path_results,
    windows_of,
)
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch, ForwardOverrides
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, RelayField
from aserve.gpu.step.held import HeldSample
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS, DeviceState, DeviceStep, exact_kv_lens
from aserve.gpu.step.results import Packed, pack
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.executor import DecodeCaps


@dataclass(frozen=True, slots=True)
class _Window:
    """The values that the end of a step needs beside its plan and its samples."""

    tree: TreeOfStep | None
    features: tuple[Tensor, ...]  # of the target, for the drafter
    publish: OnPublish
    is_open: Tensor | None = None  # bool [logits], whether the output may go on behind the node


class Speculative:
    """A `DecodeMode`."""

    __slots__ = (
        "_drafter",
        "_fuse",
        "_trees",
        "_verification",
        "can_fuse",
        "caps",
        "fields",
        "graph_widths",
        "num_draft_forwards",
        "num_forwards",
    )

    def __init__(
        self,
        drafter: Drafter,
        fuse: FuseDrafter | None = None,
        verification: Verification | None = None,
    ) -> None:
        """verification: other than the coupled one."""
        self._drafter = drafter
        self._fuse = fuse
        self._verification = verification
        self._trees = None if drafter.tree is None else DraftTrees(drafter.tree, drafter.max_drafts)
        self.caps = DecodeCaps(
            max_tokens_per_step=drafter.max_drafts + 1,
            tree=drafter.tree,
            key_lookahead=drafter.key_lookahead,
            whole_windows=verification is not None,
            continues_repeats=drafter.num_forwards == 0,
        )
        self.can_fuse = True
        self.fields: tuple[RelayField, ...] = (
            RelayField(SEQ_LEN, (), torch.int64),
            RelayField(DRAFTS, (drafter.max_drafts,), torch.int64),
            *self._tree_fields,
            *drafter.fields,
            *(() if verification is None else verification.fields),
        )
        self.num_forwards = 1
        self.num_draft_forwards = drafter.num_forwards
        self.graph_widths: tuple[int, ...] = (1, drafter.max_drafts + 1)

    def fused_step(
        self, target: FusedDecoder, make: MakeFusedDraft, state: DeviceState
    ) -> FusedStep:
        """Returns the fused step of this mode, made from that of the target model."""
        drafter = None if self._fuse is None else self._fuse(make, state)
        is_block = self._verification is not None and self._verification.is_block
        return FusedSpeculation(target, drafter, self._drafter.inputs, is_block=is_block)

    def sample_ops(self, ops: SampleOps, state: DeviceState) -> SampleOps:
        """Returns the sampling operators of this mode, made from those of the device."""
        return (
            ops if self._verification is None else self._verification.sample_ops(ops, state.relay)
        )

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        drafting = arrays.ints("drafting")
        if not len(drafting):
            return
        relay, query_lens = runner.relay, arrays.ints("query_lens")
        roots = (query_lens.cumsum(0) - query_lens).index_select(0, drafting)
        rows = arrays.ints("rows").index_select(0, drafting)
        num_drafts = int(plan.num_drafts.max())
        drafts = self._drafter.draft(
            runner,
            DraftRows(
                iteration=plan.iteration,
                rows=rows,
                lens=exact_kv_lens(arrays, relay).index_select(0, drafting),
                roots=relay.resolve(arrays.ints("input_ids").index_select(0, roots)),
                num_drafts=num_drafts,
                max_len=int(plan.len_bounds.max(initial=0)) + num_drafts,
                # The logits of held rows are in none of the slices, and may need noise.
                needs_noise=len(plan.held_rows) > 0
                or any(part.needs_noise for part in plan.logits.slices),
                counts=arrays.ints("num_drafts").index_select(0, drafting),
            ),
        )
        relay.write(DRAFTS, rows, widened(drafts.tokens, self._drafter.max_drafts))
        if self._trees is not None and drafts.parents is not None:
            self._trees.write(relay, rows, widened(drafts.parents, self._drafter.max_drafts))

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        capture = None if step.plan.batch.skips_drafter else self._drafter.inputs.capture()
        step, tree = self._with_tree(runner, step, capture)
        hidden = runner.forward(step.batch)
        features = self._drafter.inputs.features(capture, hidden)
        runner.hold(step, hidden, features)
        paths = None if tree is None else tree.paths_of(step)
        if self._verification is not None:
            self._verification.write_windows(step, runner.relay)
        sampled = runner.sample(step, hidden, paths)
        packed = self._finish(runner, step, sampled, _Window(tree, features, publish))
        if not (step.plan.held_windows > 1).any():
            return packed
        held = step.arrays.ints("held_rows")
        names = (DRAFTS, *(field.name for field in self._tree_fields))
        return packed.with_drafts(*(runner.relay.read(name, held) for name in names))

    def sample_held(self, runner: StepRunner, held: HeldSample, publish: OnPublish) -> Packed:
        indices = held.origin.indices.index_select(0, held.kept)
        features = tuple(values.index_select(0, held.kept) for values in held.origin.features)
        batch = _held_batch(held, held.origin.step.batch, indices)
        step = DeviceStep(held.plan, held.arrays, runner.init_forward(batch))
        step, tree = self._with_tree(runner, step, None)
        sampled = runner.sample_held(held, None if tree is None else tree.paths_of(step))
        is_open = (held.mask != 0).any(dim=1)
        return self._finish(runner, step, sampled, _Window(tree, features, publish, is_open))

    def _with_tree(
        self, runner: StepRunner, step: DeviceStep, capture: HiddenCapture | None
    ) -> tuple[DeviceStep, TreeOfStep | None]:
        """Returns the step as its forward computes it, and the trees of its windows."""
        tree = None if self._trees is None else self._trees.of(step, runner.relay)
        overrides = ForwardOverrides(capture=capture)
        if tree is not None:
            overrides = dataclasses.replace(
                overrides, rope_positions=tree.positions, tree_mask=tree.mask
            )
        batch = step.batch.overridden(overrides, is_debug=step.batch.is_debug)
        return dataclasses.replace(step, batch=batch), tree

    def _finish(
        self, runner: StepRunner, step: DeviceStep, sampled: Sampled, window: _Window
    ) -> Packed:
        """Verifies, publishes, extends and stashes."""
        tree = window.tree
        parents = None if tree is None else tree.parents
        windows = windows_of(step, sampled.tokens, parents, window.is_open)
        accepted = self._accept(windows)
        if tree is not None:
            compact(runner.state.pools, step.batch, windows.starts, accepted)
        verified = Verified(
            rows=step.arrays.ints("sample_rows"),
            starts=windows.starts,
            paths=accepted.paths,
            tokens=accepted.tokens,
            counts=accepted.counts,
            last=accepted.last,
            step_lens=_lens_after(step, windows, accepted),
            features=window.features,
        )
        window.publish(verified.step_lens)
        skips = step.plan.batch.skips_drafter
        fields = {} if skips else self._drafter.extend(runner, step, verified)
        runner.relay.stash(
            verified.rows, {LAST_TOKEN: verified.last, **fields}, iteration=step.iteration
        )
        scored = _scored(step)
        results = path_results(sampled, windows, accepted, scored)
        return pack(accepted.tokens, accepted.counts, results)

    @property
    def _tree_fields(self) -> tuple[RelayField, ...]:
        return () if self._trees is None else self._trees.fields

    def _accept(self, windows: Windows) -> Accepted:
        if windows.parents is None or self._trees is None:
            return accept_chain(windows)
        return accept_tree(windows, self._trees.depth(windows.width - 1))


def _lens_after(step: DeviceStep, windows: Windows, accepted: Accepted) -> Tensor:
    """int64 [rows of the step]: KV lengths without what was rejected."""
    row_of_token = step.batch.token_to_row.index_select(0, windows.starts)
    num_rejected = step.arrays.ints("windows") - accepted.counts
    return step.batch.lens.index_add(0, row_of_token, -num_rejected)


def _held_batch(held: HeldSample, batch: ForwardBatch, indices: Tensor) -> DeviceBatch:
    """Returns the windows of held rows, whose tokens have these indices in the step's batch."""
    ints, plan = held.arrays.ints, held.plan
    ends = ints("query_lens").cumsum(0)
    roots = indices.index_select(0, ends - ints("query_lens"))
    return DeviceBatch(
        iteration=plan.iteration,
        rows=ints("rows"),
        query_lens=ints("query_lens"),
        kv_lens=batch.cache_positions.index_select(0, roots),
        input_ids=batch.input_ids.index_select(0, indices),
        token_to_row=ints("token_to_row"),
        offsets=ints("offsets"),
        query_lens_cpu=plan.query_lens,
        len_bounds_cpu=plan.len_bounds,
    )


def _scored(step: DeviceStep) -> Tensor:
    """int64 [m], the logits rows with logprobs, over all slices."""
    parts, start = [], 0
    for number, part in enumerate(step.plan.logits.slices):
        parts.append(step.arrays.ints(f"slice{number}.scored") + start)
        start += part.num
    return torch.cat(parts) if parts else step.arrays.ints("sample_rows")[:0]
