"""`FutureMap`: the relay of values that the host does not know yet, one row per request.

A decode mode declares the fields; the relay knows no algorithm by name.
"""

# Theory of operation
#
# The scheduler launches step N + 1 while step N still runs, so it does not know the token that step
# N samples, nor, with speculation, how many tokens step N accepts. These values never travel to the
# host and back. Step N writes them into tables on the device, and step N + 1 reads them there:
#
#   field         shape per row   written by   read by
#   last_token    ()              stash        resolve: replaces placeholders in input_ids
#   seq_len       ()              publish      resolve: replaces KV lengths that are only bounds
#   drafts        (max drafts,)   stash        resolve: fills the draft positions of input_ids
#   (any other that a mode declares)
#
# Fields. Each field is one tensor [max_rows + 1, *shape]. All are allocated before any graph is
# captured, because a graph keeps the addresses of its tensors. Row 0 is padding: padded steps write
# it, and nobody reads it.
#
# Placeholders. An unknown token stands in `input_ids` as -row. Token ids are >= 0, so chunks of a
# prompt and placeholders mix freely in one batch, and one expression resolves all of them:
#
#   ids = where(ids < 0, last_token[clamp(-ids, min=0)], ids)
#
# Order. All reads and writes run on the executor's stream in launch order, so a read in step N + 1
# sees the write of step N without any synchronisation. Within a step:
#   - `forget` runs at the head and clears the stamps of rows that have a new request.
#   - `publish` runs as soon as the lengths are known, which with speculation is after verification
#     and before the drafter runs. The host gets a copy at the same time.
#   - `stash` runs at the end and writes all other fields.
#
# Stamps. `written_iter[row]` is the iteration that stashed last. The scheduler sends with each row
# the iteration that it expects there (`ScheduleBatch.expects`). In debug mode (all tests) a step
# whose stamp differs fails: a stash is missing or came too late, or a row was reused. A deferred
# Sample stamps the iteration of its own step.
#
# Lengths on the host. Some attention backends plan on the host from exact lengths
# (`Capabilities.host_lens`). For these, `PublishedLens` (transfer/host_copy.py) keeps the last
# published length of each row. Before it plans a step with bounds, the executor waits for these
# lengths and replaces the bounds. Then only what follows publish, the drafter, overlaps.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.errors import BugError

LAST_TOKEN = "last_token"
SEQ_LEN = "seq_len"
NEVER = 0  # the stamp of a row that no step has written; iterations begin at 1


@dataclass(frozen=True, slots=True)
class RelayField:
    name: str
    shape: tuple[int, ...]  # of one row's value
    dtype: torch.dtype


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """table [max_rows + 1, ...], rows int64 [n] -> a copy [n, ...]."""
    return table.index_select(0, rows)


def scatter_rows(
    table: Tensor, rows: Tensor, values: Tensor, stamps: Tensor, iteration: Tensor
) -> None:
    """Writes values [n, ...] and their stamp to the given rows. stamps int64 [max_rows + 1],
    iteration int64 [1]. Row 0 may occur more than once."""
    table.index_copy_(0, rows, values)
    stamps.index_copy_(0, rows, iteration.expand(len(rows)))


@dataclass(frozen=True, slots=True)
class RowOps:
    """The operators with which a device reads and writes rows of the relay."""

    gather: Callable[[Tensor, Tensor], Tensor] = gather_rows
    scatter: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = scatter_rows


PLAIN_ROW_OPS = RowOps()


class FutureMap:
    """The relay's tables. Written on the executor's stream by `publish`, `stash` and `forget`."""

    __slots__ = ("_fields", "_ops", "written_iter")

    def __init__(
        self,
        fields: tuple[RelayField, ...],
        *,
        max_rows: int,
        device: torch.device,
        ops: RowOps = PLAIN_ROW_OPS,
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
        """The table itself, [max_rows + 1, *shape], for kernels that read it at a step's head."""
        return self._fields[name]

    def read(self, name: str, rows: Tensor) -> Tensor:
        """rows int64 [n] -> a copy [n, *shape]."""
        return self._ops.gather(self._fields[name], rows)

    def resolve(self, ids: Tensor) -> Tensor:
        """ids int64 [tokens], -row in place of a row's last token -> ids without placeholders."""
        tokens = self._fields[LAST_TOKEN].index_select(0, (-ids).clamp_(min=0))
        return torch.where(ids < 0, tokens, ids)

    def publish(self, rows: Tensor, seq_lens: Tensor) -> None:
        """Stores the KV length of each row after this step. Only for modes that declare SEQ_LEN."""
        self.write(SEQ_LEN, rows, seq_lens)

    def write(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Writes a field, values [n, *shape], without a stamp, for readers later in this step."""
        self._fields[name].index_copy_(0, rows, values)

    def stash(self, rows: Tensor, fields: Mapping[str, Tensor], *, iteration: Tensor) -> None:
        """Writes fields [n, *shape] and stamps the rows. Fields that are not given keep their
        values. The iteration is a tensor, int64 [1], because it differs at each replay of a graph.
        """
        for name, values in fields.items():
            self._ops.scatter(self._fields[name], rows, values, self.written_iter, iteration)

    def forget(self, rows: Tensor) -> None:
        """Clears the stamps of rows that have a new request, which must not read the old values."""
        self.written_iter.index_fill_(0, rows, NEVER)
