"""`StateCheckpoints`: copies of rows' recurrent states, from which rows of other requests begin.

A step reads and writes what `ScheduleBatch.states` says. The copies are made on the executor's
stream, before the step and after it, whether the step is a graph, a fused step, or neither. A
checkpoint holds one state of each layer: the one before a position p. It lies in the row's place
p mod S; the last inputs of conv lie by position as well, and are copied as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from aserve.messages.base import array_i32
from aserve.messages.step import ScheduleBatch
from aserve_kernels.delta_rule import DeltaStates


class StateCheckpoints:
    """`rows` and `pages` have the states of each layer; page 0 is padding."""

    __slots__ = ("_pages", "_rows")

    def __init__(self, rows: Sequence[DeltaStates] = (), pages: Sequence[DeltaStates] = ()) -> None:
        self._rows, self._pages = rows, pages

    @classmethod
    def of(
        cls,
        rows: Mapping[int, DeltaStates],
        num_pages: int,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor],
    ) -> StateCheckpoints:
        """`zeros` allocates memory."""
        pages = [
            DeltaStates(
                zeros((num_pages, 1, *layer.matrices.shape[2:]), layer.matrices.dtype),
                zeros((num_pages, *layer.inputs.shape[1:]), layer.inputs.dtype),
            )
            for layer in rows.values()
        ]
        return cls([*rows.values()], pages)

    @property
    def size_bytes(self) -> int:
        return sum(pages.matrices.nbytes + pages.inputs.nbytes for pages in self._pages)

    def read(self, batch: ScheduleBatch) -> None:
        """Before the step: rows that begin at a checkpoint get its states."""
        if batch.states is None:
            return
        kv_lens = dict(_pairs(batch.rows, batch.kv_lens))
        for row, page in _pairs(batch.states.read_rows, batch.states.read_pages):
            for state, checkpoint in self._tables(row, page, kv_lens[row]):
                state.copy_(checkpoint)

    def write(self, batch: ScheduleBatch) -> None:
        """After the step: the states at the ends of rows become checkpoints."""
        if batch.states is None:
            return
        kv_lens = dict(_pairs(batch.rows, batch.kv_lens))
        query_lens = dict(_pairs(batch.rows, batch.query_lens))
        for row, page in _pairs(batch.states.written_rows, batch.states.written_pages):
            for state, checkpoint in self._tables(row, page, kv_lens[row] + query_lens[row]):
                checkpoint.copy_(state)

    def _tables(self, row: int, page: int, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the parts of a row's state before a position, each with its place in a page."""
        for rows, pages in zip(self._rows, self._pages, strict=True):
            place = position % rows.matrices.shape[1]
            yield rows.matrices[row, place], pages.matrices[page, 0]
            yield rows.inputs[row], pages.inputs[page]


def _pairs(keys: bytes, values: bytes) -> Iterator[tuple[int, int]]:
    return zip(map(int, array_i32(keys)), map(int, array_i32(values)), strict=True)
