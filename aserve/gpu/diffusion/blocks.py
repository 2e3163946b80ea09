"""The blocks of a step's rows on the device, and the forward that computes them.

All shapes follow from host values: a row denoises if it has drafts in the step's plan, and then the
forward computes one or two whole blocks of it. Which block that is, what is still masked in it, and
whether the block before it was just finished, is known on the device only. It stands in the relay
between two passes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch
from aserve.gpu.step.future_map import NEVER, SEQ_LEN, RelayField
from aserve.gpu.step.resolve import DRAFTS, DeviceStep
from aserve.messages.base import ArrayI32

IS_OPEN = "is_open"
NUM_EDITS = "num_edits"
IS_FINISHED = "is_finished"
PADDING = 0  # the row of padding tokens, whose KV is in page 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of n rows before a pass. `is_open` are positions that are still masked. If the
    last pass has finished a block, the row has begun the next one, and the KV of the finished block
    still has to be computed from its final tokens.
    """

    rows: Tensor  # int64 [n]
    lens: Tensor  # int64 [n], tokens that were known before the block was begun
    ids: Tensor  # int64 [n, block_len]
    is_open: Tensor  # bool [n, block_len]
    num_edits: Tensor  # int64 [n], passes that only edited
    has_finished: Tensor  # bool [n]
    finished_ids: Tensor  # int64 [n, block_len], arbitrary where no block was finished
    mask_id: int

    @property
    def block_len(self) -> int:
        return self.ids.shape[1]

    @property
    def offsets(self) -> Tensor:
        """int64 [block_len]."""
        return torch.arange(self.block_len, device=self.ids.device)

    @property
    def num_known(self) -> Tensor:
        """int64 [n], the tokens of each block that its first pass knew: the end of a prompt."""
        return self.lens % self.block_len

    @property
    def is_known(self) -> Tensor:
        """bool [n, block_len]. It follows from positions, as a prompt may hold the mask id."""
        return self.offsets < self.num_known[:, None]

    @property
    def starts(self) -> Tensor:
        """int64 [n]."""
        return self.lens - self.num_known

    @property
    def positions(self) -> Tensor:
        """int64 [n, block_len]."""
        return self.starts[:, None] + self.offsets


def relay_fields(block_len: int) -> tuple[RelayField, ...]:
    return (
        RelayField(SEQ_LEN, (), torch.int64),
        RelayField(DRAFTS, (block_len,), torch.int64),
        RelayField(IS_OPEN, (block_len,), torch.int64),
        RelayField(NUM_EDITS, (), torch.int64),
        RelayField(IS_FINISHED, (), torch.int64),
    )


def read_blocks(runner: StepRunner, step: DeviceStep, *, mask_id: int) -> Blocks:
    """Reads where the last pass left the blocks. A row that no pass has stamped begins a block, of
    which the token pool has what is known."""
    relay, pools = runner.relay, runner.state.pools
    drafting = step.arrays.ints("drafting")
    rows = step.batch.rows.index_select(0, drafting)
    is_new = relay.written_iter.index_select(0, rows) == NEVER
    is_open = (relay.read(IS_OPEN, rows) > 0) | is_new[:, None]
    last_ids = relay.read(DRAFTS, rows)
    blocks = Blocks(
        rows=rows,
        lens=step.batch.kv_lens.index_select(0, drafting),
        ids=last_ids,
        is_open=is_open,
        num_edits=relay.read(NUM_EDITS, rows).masked_fill(is_new, 0),
        has_finished=(relay.read(IS_FINISHED, rows) > 0) & ~is_new,
        finished_ids=last_ids,
        mask_id=mask_id,
    )
    is_known, shape = blocks.is_known, blocks.ids.shape
    owners = rows[:, None].expand(shape)
    slots = pools.slots(0, owners.reshape(-1), blocks.positions.reshape(-1))
    known = pools.token_pool.index_select(0, slots).view(shape).to(torch.int64)
    is_open = is_open & ~is_known
    ids = torch.where(is_known, known, last_ids.masked_fill(is_open, mask_id))
    return dataclasses.replace(blocks, ids=ids, is_open=is_open)


def forward_of(
    runner: StepRunner, step: DeviceStep, blocks: Blocks, *, is_folded: bool
) -> tuple[ForwardBatch, Tensor]:
    """Returns the forward of the step's prompts and of these blocks, and the indices of the blocks'
    tokens in it, int64 [n * block_len]. Writes the blocks' ids to the token pool.

    A folded forward has each row a second time, with the block that it has just finished, which the
    first one sees. In place of rows that have finished none it computes padding. A forward that is
    not folded has the finished block in place of the next one.
    """
    plan, batch, arrays = step.plan, step.batch, step.arrays
    block_len, is_block_cpu = blocks.block_len, plan.num_drafts > 0
    query_lens_cpu = np.where(is_block_cpu, block_len, plan.query_lens).astype(np.int32)
    ends_cpu = np.where(
        is_block_cpu & plan.is_exact,
        plan.kv_lens // block_len * block_len + block_len,
        plan.len_bounds,
    ).astype(np.int32)
    own = blocks if is_folded else _finished_first(blocks)
    drafting, is_block = arrays.ints("drafting"), arrays.ints("num_drafts") > 0
    query_lens = torch.where(is_block, block_len, batch.query_lens)
    starts = query_lens.cumsum(0) - query_lens
    row_indices = torch.arange(len(query_lens), device=starts.device)
    num_tokens = int(query_lens_cpu.sum())
    token_to_row = row_indices.repeat_interleave(query_lens, output_size=num_tokens)
    tokens = torch.arange(num_tokens, device=starts.device)
    offsets = tokens - starts.index_select(0, token_to_row)
    # A block may be longer than the part of it that the plan names.
    sources = batch.cu_query_lens.index_select(0, token_to_row) + offsets
    input_ids = batch.input_ids.index_select(0, sources.clamp(max=max(batch.num_tokens - 1, 0)))
    places = (starts.index_select(0, drafting)[:, None] + blocks.offsets).reshape(-1)
    whole = DeviceBatch(
        iteration=batch.iteration,
        rows=batch.rows,
        query_lens=query_lens,
        kv_lens=batch.kv_lens.index_copy(0, drafting, own.starts),
        input_ids=input_ids.index_copy(0, places, own.ids.reshape(-1)),
        token_to_row=token_to_row,
        offsets=offsets,
        query_lens_cpu=query_lens_cpu,
        len_bounds_cpu=ends_cpu,
        is_exact=plan.is_exact and is_folded,
    )
    if is_folded and len(blocks.rows):
        whole = _with_finished(whole, blocks, ends_cpu[is_block_cpu])
    made = runner.init_forward(whole)
    pool = runner.state.pools.token_pool
    pool.index_copy_(0, made.slots[0], whole.input_ids.to(pool.dtype))
    return made, places


def _finished_first(blocks: Blocks) -> Blocks:
    """Returns the finished blocks, and where there is none the blocks themselves."""
    has_finished = blocks.has_finished
    ids = torch.where(has_finished[:, None], blocks.finished_ids, blocks.ids)
    lens = torch.where(has_finished, blocks.lens - blocks.block_len, blocks.lens)
    return dataclasses.replace(blocks, ids=ids, lens=lens)


def _with_finished(batch: DeviceBatch, blocks: Blocks, bounds_cpu: ArrayI32) -> DeviceBatch:
    """Returns the batch with one more row for each block. bounds_cpu int32 [n]: upper bounds of the
    blocks' ends."""
    (num_rows, block_len), has_finished = blocks.ids.shape, blocks.has_finished
    first = _finished_first(blocks)
    ids = first.ids.masked_fill(~has_finished[:, None], blocks.mask_id)
    query_lens = torch.full_like(blocks.rows, block_len)
    indices = torch.arange(num_rows, device=ids.device) + len(batch.rows)
    return dataclasses.replace(
        batch,
        rows=torch.cat((batch.rows, blocks.rows.masked_fill(~has_finished, PADDING))),
        query_lens=torch.cat((batch.query_lens, query_lens)),
        kv_lens=torch.cat((batch.kv_lens, first.starts.masked_fill(~has_finished, 0))),
        input_ids=torch.cat((batch.input_ids, ids.reshape(-1))),
        token_to_row=torch.cat((batch.token_to_row, indices.repeat_interleave(block_len))),
        offsets=torch.cat((batch.offsets, blocks.offsets.repeat(num_rows))),
        query_lens_cpu=np.append(batch.query_lens_cpu, np.full(num_rows, block_len, np.int32)),
        len_bounds_cpu=np.append(batch.len_bounds_cpu, bounds_cpu),
        is_exact=False,
    )
