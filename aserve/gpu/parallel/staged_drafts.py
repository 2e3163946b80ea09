"""The drafts of a pipeline: the last stage makes them, and the first one gets them.

    step N   last stage                         first stage
             drafts, from what it has relayed
             sends the drafts             --->  embeds them, and begins the forward
             verifies, extends

The stages in between read no ids. A row is in one step at a time, so the last stage can draft for
it as soon as its step is launched, while it still verifies the step before (early_drafts.py).

A step that has failed, or that was refused because one before it has, makes no drafts. The first
stage must not await them: with the next step that it runs, the last one tells that it has gone on.
The first stage then computes the old steps with drafts of zeros, and the last stage throws away
what comes of them.

Trees. Their shapes travel with the drafts, and from the first stage to the ones in between: masks
and positions of the nodes follow from them. The last stage knows which path is accepted, and moves
its KV right behind the root. All other stages get the slots of that move. They need it before any
step that was launched since: a page may be one of the prefix cache by then, or have another row. So
with trees the last stage sends a message for every step, drafts or none, and the moves of the steps
before come first.

A row that was retracted may have lost its pages before its move comes. What would be moved to a
page with a new owner is left out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.parallel.pipe import Pipe
from aserve.gpu.spec.base import NO_HIDDEN, Drafter, DraftRows, Drafts, HiddenInputs, Verified
from aserve.gpu.spec.verify import path_moves
from aserve.gpu.step.future_map import RelayField
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.step import DraftTree, ScheduleBatch

NOTHING = torch.empty(0, dtype=torch.int64)
MANY_STEPS = 64  # more than are in flight


@dataclass(frozen=True, slots=True)
class TurnDevice:
    """The device of an executor's thread, for what is not part of its step."""

    stage: Callable[[HostArrays], DeviceArrays]  # copies host values to the device
    wait: Callable[[], None]  # until it has done all that was asked of it


@dataclass(frozen=True, slots=True)
class StepWatch:
    """Is told of steps: of a launch on the event loop's thread, and of a turn on the executor's."""

    note_launch: Callable[[ScheduleBatch], None]
    begin: Callable[[ScheduleBatch, TurnDevice], None]


def ignore_launch(_batch: ScheduleBatch) -> None:
    pass


def ignore_turn(_batch: ScheduleBatch, _device: TurnDevice) -> None:
    pass


UNWATCHED = StepWatch(ignore_launch, ignore_turn)


class DraftSender:
    """A `Drafter` around that of the last stage, which sends its drafts to the first stage."""

    def __init__(self, drafter: Drafter, pipe: Pipe) -> None:
        self.max_drafts = drafter.max_drafts
        self.tree = drafter.tree
        self.inputs: HiddenInputs = drafter.inputs
        self.fields: tuple[RelayField, ...] = drafter.fields
        self.key_lookahead = drafter.key_lookahead
        self.num_forwards = drafter.num_forwards
        self._drafter = drafter
        self._pipe = pipe
        self._next = 0  # the step behind the last one that had its drafts, or had none
        self._sent: int | None = None  # the step whose drafts were sent, until it is passed

    def draft(self, runner: StepRunner, rows: DraftRows) -> Drafts:
        drafts = self._drafter.draft(runner, rows)
        values = drafts.tokens if self.tree is None else _with_parents(drafts)
        width = rows.num_drafts - drafts.tokens.shape[1]
        self._pipe.send(rows.iteration, functional.pad(values, (0, width)))
        self._sent = rows.iteration
        return drafts

    def extend(
        self, runner: StepRunner, step: DeviceStep, verified: Verified
    ) -> Mapping[str, Tensor]:
        if self.tree is not None and step.plan.num_drafts.any():
            moves = path_moves(step.batch, verified.starts, verified.paths, verified.counts)
            slots = torch.stack([torch.stack(each) for each in moves])
            self._pipe.send(step.plan.iteration, slots, is_move=True)
        return self._drafter.extend(runner, step, verified)

    def pass_step(self, iteration: int) -> None:
        """Call it when a step has its drafts, or has none."""
        is_awaited = self.tree is not None or iteration != self._next
        if is_awaited and self._sent != iteration:
            self._pipe.send(iteration, NOTHING)
        self._next, self._sent = iteration + 1, None


def _with_parents(drafts: Drafts) -> Tensor:
    """[2, n, drafts]."""
    assert drafts.parents is not None
    return torch.stack((drafts.tokens, drafts.parents))


class ReceivedDrafts:
    """A `Drafter` of the stages before the last one. Between the first and the last stage only the
    shapes of trees are read."""

    def __init__(
        self, max_drafts: int, pipe: Pipe | None, next_pipe: Pipe | None, tree: DraftTree | None
    ) -> None:
        """pipe: from which drafts come; next_pipe: to a stage that reads them, too."""
        self.max_drafts = max_drafts
        self.tree = tree
        self.inputs = NO_HIDDEN
        self.fields: tuple[RelayField, ...] = ()
        self.key_lookahead = 0
        self.num_forwards = 0
        self._pipe = pipe
        self._next_pipe = next_pipe
        self._window = NOTHING  # of the step that has its turn
        self._has_window = False
        self._moves = TreeMoves()
        if pipe is not None:
            pipe.on_move = self._note_move

    def begin(self, runner: StepRunner, batch: ScheduleBatch, device: TurnDevice | None) -> None:
        """Awaits the drafts of a step, before any of its pages is written. Does nothing the second
        time."""
        if self._pipe is None or self._has_window:
            return
        self._moves.pools, self._moves.device = runner.state.pools, device
        self._window = NOTHING
        if self.tree is not None or len(drafting_rows(batch)):
            window = self._pipe.take(batch.iteration)
            self._window = NOTHING if window is None else window.view(torch.int64)
        if self._next_pipe is not None:
            self._next_pipe.send(batch.iteration, self._window)
        self._moves.note_pages(batch)
        self._has_window = True

    def pass_step(self, _iteration: int) -> None:
        self._has_window = False

    def draft(self, _runner: StepRunner, rows: DraftRows) -> Drafts:
        shape = (1 if self.tree is None else 2, len(rows.rows), rows.num_drafts)
        values = self._window
        if not len(values):
            values = torch.zeros(shape, dtype=torch.int64, device=rows.rows.device)
        values = values.view(shape)
        return Drafts(values[0], None if self.tree is None else values[1])

    def extend(
        self, _runner: StepRunner, _step: DeviceStep, _verified: Verified
    ) -> Mapping[str, Tensor]:
        return {}

    def _note_move(self, iteration: int, data: Tensor) -> None:
        slots = data.view(torch.int64)
        if self._next_pipe is not None:
            self._next_pipe.send(iteration, slots, is_move=True)
        self._moves.run(iteration, slots)


class TreeMoves:
    """Moves the KV of accepted paths in the pools of a stage."""

    def __init__(self) -> None:
        self.pools: KvPools | None = None
        self.device: TurnDevice | None = None
        self._begun: deque[tuple[int, list[ArrayI32]]] = deque(maxlen=MANY_STEPS)

    def note_pages(self, batch: ScheduleBatch) -> None:
        """The step has its turn, and gives pages to rows."""
        pages = [array_i32(writes.pages) for writes in batch.page_writes]
        self._begun.append((batch.iteration, pages))

    def run(self, iteration: int, slots: Tensor) -> None:
        """slots int64 [2 * groups * n], sources and targets of the step's move."""
        pools = self.pools
        assert pools is not None
        sources, targets = slots.view(2, len(pools.page_tables), -1)
        given = self._given_since(iteration)
        if any(map(len, itertools.chain(*given))):
            every = [np.concatenate(pages) for pages in zip(*given, strict=True)]
            is_kept = torch.stack(
                [
                    ~(target[:, None] // pools.page_size == pages).any(dim=1)
                    for target, pages in zip(targets, self._staged(every), strict=True)
                ]
            )
            sources, targets = sources * is_kept, targets * is_kept
        pools.move(tuple(sources), tuple(targets))

    def _given_since(self, iteration: int) -> list[list[ArrayI32]]:
        """Returns the pages that were given away behind the step, by step and group. NOTE: numbers
        of steps begin anew after those that an engine measures when it starts."""
        given: list[list[ArrayI32]] = []
        for number, pages in reversed(self._begun):
            if number == iteration:
                break
            given.append(pages)
        return given

    def _staged(self, every: list[ArrayI32]) -> list[Tensor]:
        """Returns the pages of each layer group on the device, int64 [n] each."""
        assert self.device is not None
        arrays = HostArrays()
        for group, pages in enumerate(every):
            arrays.add(f"{group}", pages)
        staged = self.device.stage(arrays)
        return [staged.ints(f"{group}") for group in range(len(every))]


def drafting_rows(batch: ScheduleBatch) -> ArrayI32:
    """Returns the rows with drafts."""
    if batch.verify is None:
        return np.empty(0, np.int32)
    return array_i32(batch.rows)[array_i32(batch.verify.num_drafts) > 0]
