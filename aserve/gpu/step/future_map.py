"""The relay of what the host cannot know yet: one row per request, on the device.

It knows no algorithm: a decode mode declares its fields. Written on the executor's stream only, by
`publish` (lengths, early in a step), `stash` (the rest, at its end) and `forget` (new tenants).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.errors import BugError

LAST_TOKEN = "last_token"
SEQ_LEN = "seq_len"
NEVER = 0  # no step has this number: what a forgotten row was written by


@dataclass(frozen=True, slots=True)
class RelayField:
    """`shape` is that of one row's value."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """table [max_rows + 1, ...], rows int64 [n] -> a copy [n, ...]."""
    return table.index_select(0, rows)


def scatter_rows(
    table: Tensor, rows: Tensor, values: Tensor, stamps: Tensor, iteration: Tensor
) -> None:
    """values [n, ...] of the table's dtype; stamps int64 [max_rows + 1], iteration int64 [1]. Row 0
    may stand there more than once."""
    table.index_copy_(0, rows, values)
    stamps.index_copy_(0, rows, iteration.expand(len(rows)))


@dataclass(frozen=True, slots=True)
class RowOps:
    """How a device reads and writes rows of the relay."""

    gather: Callable[[Tensor, Tensor], Tensor] = gather_rows
    scatter: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = scatter_rows


PLAIN_ROWS = RowOps()


class FutureMap:
    """All tensors are allocated here, once: [max_rows + 1, ...]. Row 0 is padding; it may be
    written, and nobody reads it."""

    __slots__ = ("_fields", "_ops", "written_iter")

    def __init__(
        self,
        fields: tuple[RelayField, ...],
        *,
        max_rows: int,
        device: torch.device,
        ops: RowOps = PLAIN_ROWS,
    ) -> None:
        self._ops = ops
        declared = (RelayField(LAST_TOKEN, (), torch.int64), *fields)
        self._fields = {
            field.name: torch.zeros((max_rows + 1, *field.shape), dtype=field.dtype, device=device)
            for field in declared
        }
        if len(self._fields) != len(declared):
            raise BugError(f"a relay field is declared twice: {[field.name for field in declared]}")
        self.written_iter = torch.full((max_rows + 1,), NEVER, dtype=torch.int64, device=device)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def table(self, name: str) -> Tensor:
        """[max_rows + 1, *shape], itself: to be read in a step's head, in order."""
        return self._fields[name]

    def read(self, name: str, rows: Tensor) -> Tensor:
        """rows int64 [n] -> a copy [n, *shape]."""
        return self._ops.gather(self._fields[name], rows)

    def resolve(self, ids: Tensor) -> Tensor:
        """ids int64 [tokens], where -row stands for that row's last token -> ids without any."""
        tokens = self._fields[LAST_TOKEN].index_select(0, (-ids).clamp_(min=0))
        return torch.where(ids < 0, tokens, ids)

    def publish(self, rows: Tensor, seq_lens: Tensor) -> None:
        """Only in a mode that declares SEQ_LEN: KV length of each row after this step."""
        self._fields[SEQ_LEN].index_copy_(0, rows, seq_lens)

    def stash(self, rows: Tensor, fields: Mapping[str, Tensor], *, iteration: Tensor) -> None:
        """fields [n, *shape]; what is not given stays. Stamps the rows with the iteration, int64
        [1]: a captured step has another one at each replay.
        """
        for name, values in fields.items():
            self._ops.scatter(self._fields[name], rows, values, self.written_iter, iteration)

    def forget(self, rows: Tensor) -> None:
        """The rows have new tenants, who must not read what is there."""
        self.written_iter.index_fill_(0, rows, NEVER)
