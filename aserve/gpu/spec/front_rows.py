"""The extend inputs of a drafter of several modules, where module k reads k tokens ahead.

At position i, module k reads what module k - 1 returned there, and token t_{i+k}. The last known
token is t_L, so at the positions from L - k + 1 on, module k > 1 has read drafts. When the next
step knows the tokens, it must run these positions again, or the KV that they left stays that of
rejected drafts. With D modules, each row of an extend therefore starts D - 1 positions earlier than
its row of the step: these are its front rows. Their tokens are in the token pool, and the target's
hidden states for them are kept in the relay.

A row whose front rows are not known, because a cached prefix or an earlier request computed them,
does not write them: their KV is exact already. In the pools, such rows go to slot 0, as do the
places behind a row that has fewer positions before it than front rows. So shapes follow from host
values alone, and a step can be captured.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.decode.base import StepRunner
from aserve.gpu.spec.base import Verified
from aserve.gpu.spec.drafting import set_drawn
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch
from aserve.gpu.step.future_map import FutureMap, RelayField
from aserve.gpu.step.resolve import DeviceStep

HIDDEN = "front_hidden"  # [front rows, hidden], the target's hidden states before the row's length
SPAN = "front_span"  # [2], the positions from which and up to which this request computed them


@dataclass(frozen=True, slots=True)
class FrontInputs:
    batch: ForwardBatch  # of the step's rows with their front rows; its input ids are the next ones
    hidden: Tensor  # [tokens, hidden], the target's hidden states
    last: Tensor  # int64 [samples], the place of each row's last accepted token


class FrontRows:
    """`max_width` is the width of the widest decode. Wider rows are prompts, which are not captured
    and have no more front rows than positions before them."""

    __slots__ = ("_max_width", "_num", "fields")

    def __init__(self, num: int, *, hidden_size: int, max_width: int, dtype: torch.dtype) -> None:
        self._num = num
        self._max_width = max_width
        self.fields: tuple[RelayField, ...] = (
            RelayField(HIDDEN, (num, hidden_size), dtype),
            RelayField(SPAN, (2,), torch.int64),
        )

    def inputs(self, runner: StepRunner, step: DeviceStep, verified: Verified) -> FrontInputs:
        """Returns the inputs of the step's extend, and keeps the front rows of the next one."""
        own, relay = step.batch, runner.relay
        _forget_new_rows(step, relay)
        span = relay.read(SPAN, own.rows)
        known_from = torch.where(span[:, 1] == own.kv_lens, span[:, 0], own.kv_lens)
        made = runner.init_forward(self._widened(step))
        # A token of the step has place + shift here.
        shift = made.cu_query_lens[:-1] - made.kv_lens + own.kv_lens - own.cu_query_lens[:-1]
        hidden = self._joined(relay, own, made, torch.cat(verified.features, dim=1), shift)
        text = runner.state.pools.token_pool.index_select(0, made.slots[0]).to(torch.int64)
        starts = verified.starts + shift.index_select(
            0, own.token_to_row.index_select(0, verified.starts)
        )
        next_ids = text.roll(-1)
        next_ids.index_copy_(
            0, own.cu_query_lens[1:] - 1 + shift, relay.resolve(step.arrays.ints("next_ids"))
        )
        set_drawn(next_ids, starts, verified)
        lens = _final_lens(step, verified)
        self._keep(relay, own.rows, hidden, made.cu_query_lens[:-1] + lens - made.kv_lens)
        relay.write(SPAN, own.rows, torch.stack((known_from, lens), dim=1))
        first, end = (each.index_select(0, made.token_to_row) for each in (known_from, own.lens))
        is_written = (made.cache_positions >= first) & (made.cache_positions < end)
        slots = tuple(each.where(is_written, 0) for each in made.slots)
        batch = dataclasses.replace(made, input_ids=next_ids, slots=slots)
        return FrontInputs(batch, hidden, starts + verified.counts - 1)

    def _widened(self, step: DeviceStep) -> DeviceBatch:
        """Returns the rows with as many more tokens as they have front rows; ids are arbitrary.

        The device counts the front rows as the host does: by the host's bounds, not by lengths.
        """
        own = step.batch
        bounds = own.len_bounds_cpu - own.query_lens_cpu
        is_wide = own.query_lens_cpu > self._max_width
        fronts = np.where(is_wide, np.minimum(self._num, bounds), self._num).astype(np.int32)
        more = torch.full_like(own.query_lens, self._num)
        if is_wide.any():
            fewer = step.arrays.ints("kv_lens").clamp(max=self._num)
            more = torch.where(own.query_lens > self._max_width, fewer, more)
        query_lens, query_lens_cpu = own.query_lens + more, own.query_lens_cpu + fronts
        order = torch.arange(own.num_rows, device=own.rows.device)
        num_tokens = int(query_lens_cpu.sum())
        token_to_row = order.repeat_interleave(query_lens, output_size=num_tokens)
        starts = query_lens.cumsum(0) - query_lens
        offsets = torch.arange(num_tokens, device=own.rows.device)
        return DeviceBatch(
            iteration=own.iteration,
            rows=own.rows,
            query_lens=query_lens,
            kv_lens=(own.kv_lens - more).clamp_(min=0),
            input_ids=token_to_row,
            token_to_row=token_to_row,
            offsets=offsets - starts.index_select(0, token_to_row),
            query_lens_cpu=query_lens_cpu,
            len_bounds_cpu=np.maximum(own.len_bounds_cpu, query_lens_cpu),
        )

    def _joined(
        self,
        relay: FutureMap,
        own: ForwardBatch,
        made: ForwardBatch,
        features: Tensor,
        shift: Tensor,
    ) -> Tensor:
        """Returns hidden states for the tokens of `made`: those that were kept, then the step's own
        `features`, and arbitrary ones behind them."""
        rows = made.token_to_row
        kept = relay.read(HIDDEN, own.rows).flatten(0, 1)
        indices = torch.arange(made.num_tokens, device=rows.device) - shift.index_select(0, rows)
        distance = made.cache_positions - own.kv_lens.index_select(0, rows)
        index = torch.where(
            distance < 0,
            (rows + 1) * self._num + distance,
            len(kept) + indices.minimum(own.cu_query_lens.index_select(0, rows + 1) - 1),
        )
        return torch.cat((kept, features)).index_select(0, index)

    def _keep(self, relay: FutureMap, rows: Tensor, hidden: Tensor, ends: Tensor) -> None:
        """Keeps the hidden states before the indices `ends`, int64 [rows]."""
        indices = ends[:, None] + torch.arange(-self._num, 0, device=rows.device)
        kept = hidden.index_select(0, indices.clamp_(min=0).flatten())
        relay.write(HIDDEN, rows, kept.unflatten(0, indices.shape))


def _final_lens(step: DeviceStep, verified: Verified) -> Tensor:
    """int64 [rows], the KV lengths from which each row's next extend starts. That of a held row
    starts at the root of its window, as soon as the row is sampled."""
    if not len(step.plan.held_rows):
        return verified.step_lens
    rows = step.batch.token_to_row.index_select(0, step.arrays.ints("held_tokens"))
    return verified.step_lens.index_add(0, rows, torch.full_like(rows, -1))


def _forget_new_rows(step: DeviceStep, relay: FutureMap) -> None:
    """The first extend of a new row finds what the row's former request left. When a held row is
    sampled, its step is extended again, over its window alone: then it is new no longer.

    NOTE: a step with new rows is never captured. The lengths of new rows are known, and those of
    rows that were held are bounds.
    """
    if not step.plan.batch.row_inits or step.plan.is_bound.all():
        return
    rows = step.arrays.ints("init_rows")
    relay.write(SPAN, rows, rows.new_zeros((len(rows), 2)))
