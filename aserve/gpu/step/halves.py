"""Cuts a forward into two, for overlapping one half's communication with the other's compute.

The cut lies between two rows if that balances their tokens well enough, and otherwise within a row:
then the row is in both halves, with its first tokens in the first. The second half's tokens see
those of the first, so in each layer the first half must attend before the second.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.step.forward_batch import ForwardBatch, PlanMarker

MIN_SHARE = 0.4  # of the tokens in the smaller half; below it a row is cut
KEPT = frozenset({"iteration", "capture", "is_debug"})  # equal in both halves
NEVER_CUT = frozenset({"features"})  # models with pictures have no experts


def cut_in_two(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """`batch` has at least two tokens. Neither half has an attention plan. Raises BugError if a
    draft tree would be cut."""
    middle = _middle(batch)
    return _part(batch, 0, middle), _part(batch, middle, batch.num_tokens)


def _middle(batch: ForwardBatch) -> int:
    """Returns the number of tokens of the first half."""
    num_tokens = batch.num_tokens
    ends = np.cumsum(batch.query_lens_cpu)[:-1]
    if len(ends):
        best = int(ends[np.abs(ends - num_tokens / 2).argmin()])
        if min(best, num_tokens - best) >= MIN_SHARE * num_tokens:
            return best
    return num_tokens // 2


def _part(batch: ForwardBatch, first: int, last: int) -> ForwardBatch:
    """The tokens first..last, as a forward of the rows that they belong to."""
    ends = np.cumsum(batch.query_lens_cpu)
    starts = ends - batch.query_lens_cpu
    rows = slice(int((ends <= first).sum()), int((starts < last).sum()))
    before = np.maximum(first - starts[rows], 0).astype(np.int32)  # tokens in the half before
    after = np.maximum(ends[rows] - last, 0).astype(np.int32)
    tokens = slice(first, last)

    is_whole = not (before.any() or after.any())
    if batch.tree_mask is not None and not is_whole:
        raise BugError(f"step {batch.iteration}: a draft tree cannot be cut")

    def on_device(counts: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
        return batch.rows.new_tensor(counts)

    query_lens_cpu = batch.query_lens_cpu[rows] - before - after
    lens_cpu = batch.lens_cpu
    rope = batch.rope_override
    changes = {
        "rows": batch.rows[rows],
        "query_lens": on_device(query_lens_cpu),
        "kv_lens": batch.kv_lens[rows] + on_device(before),
        "lens": batch.lens[rows] - on_device(after),
        "cu_query_lens": on_device(np.append(0, np.cumsum(query_lens_cpu)).astype(np.int32)),
        "token_to_row": batch.token_to_row[tokens] - rows.start,
        "token_rows": batch.token_rows[tokens],
        "input_ids": batch.input_ids[tokens],
        "cache_positions": batch.cache_positions[tokens],
        "slots": tuple(slots[tokens] for slots in batch.slots),
        "query_lens_cpu": query_lens_cpu,
        "len_bounds_cpu": batch.len_bounds_cpu[rows] - after,
        "lens_cpu": None if lens_cpu is None else lens_cpu[rows] - after,
        "rope_override": None if rope is None else rope[..., tokens],
        "tree_mask": None if batch.tree_mask is None else batch.tree_mask[tokens],
        "shared_pages": batch.shared_pages if is_whole else 0,
        "marker": PlanMarker(),
    }
    _check_complete(batch, {*changes, *KEPT, *NEVER_CUT})
    return dataclasses.replace(batch, **changes)


def _check_complete(batch: ForwardBatch, handled: set[str]) -> None:
    """WHY: a field that nobody thought of would reach both halves as it is."""
    missing = {field.name for field in dataclasses.fields(batch)} - handled
    if missing:
        raise BugError(f"a forward cannot be cut: nothing says what becomes of {sorted(missing)}")
