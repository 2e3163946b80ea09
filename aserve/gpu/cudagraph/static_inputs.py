"""The static inputs of a captured forward: one int64 table whose rows are the batch's tensors, and
buffers through which pieces of a forward and eager attention hand each other their tensors.

A replay reads the addresses of its capture, so the values of each step are copied there. The
buffers are allocated once for the largest forward, before any capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.step.forward_batch import ForwardBatch


class StaticTable:
    """int64 [values, tokens]. Columns from the batch's number of tokens on are padding."""

    __slots__ = ("_padding", "values")

    def __init__(self, padding: Sequence[int], num_tokens: int, device: torch.device) -> None:
        """`padding` has one value for each row of the table."""
        self.values = torch.zeros((len(padding), num_tokens), dtype=torch.int64, device=device)
        for row, value in enumerate(padding):
            self.values[row].fill_(value)
        self._padding = self.values[:, :1].clone()

    def fill(self, parts: Iterable[Tensor]) -> None:
        """parts: int64 [tokens] or [n, tokens] each, in the order of the table's rows."""
        rows = torch.cat([part.view(-1, part.shape[-1]) for part in parts])
        num_tokens = rows.shape[1]
        self.values[:, :num_tokens].copy_(rows)
        if num_tokens < self.values.shape[1]:
            self.values[:, num_tokens:].copy_(self._padding)


class HandOver:
    """The buffers between pieces and attention, by the shape of a layer's heads. Layers of one
    shape share theirs, because a layer has read them before the next one writes them."""

    __slots__ = ("_heads", "_outs")

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def buffers(shapes: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Tensor]:
            return {
                shape: torch.zeros((num_tokens, *shape), dtype=dtype, device=device)
                for shape in dict.fromkeys(shapes)
            }

        self._heads = buffers(map(heads_shape, layers))
        self._outs = buffers(map(out_shape, layers))

    def heads(self, layer: LayerSpec, num_tokens: int) -> Tensor:
        """[num_tokens, heads, head_dim], the inputs of the layer's attention."""
        return self._heads[heads_shape(layer)][:num_tokens]

    def out(self, layer: LayerSpec, num_tokens: int) -> Tensor:
        """[num_tokens, heads, out_dim], the result of the layer's attention."""
        return self._outs[out_shape(layer)][:num_tokens]

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return (*self._heads.values(), *self._outs.values())


def heads_shape(layer: LayerSpec) -> tuple[int, int]:
    return layer.num_heads + layer.num_stored_heads, layer.head_dim


def out_shape(layer: LayerSpec) -> tuple[int, int]:
    return layer.num_heads, layer.out_dim


# The rows of the table of a decode's forward; slots, rope positions and adapters follow them.
DECODE_ROWS = ("rows", "kv_lens", "lens", "input_ids", "cache_positions")
DECODE_PADDING = (0, 0, 1, 0, 0)  # one token of row 0, without KV before it


def decode_batch(table: Tensor, num_groups: int, max_len: int) -> ForwardBatch:
    """Returns a forward of one token per row, whose tensors are rows of the table."""
    num_rows = table.shape[1]
    values = dict(zip(DECODE_ROWS, table, strict=False))
    first_slot = len(DECODE_ROWS)
    indices = torch.arange(num_rows + 1, device=table.device)
    return ForwardBatch(
        iteration=0,
        rows=values["rows"],
        query_lens=torch.ones_like(values["rows"]),
        kv_lens=values["kv_lens"],
        lens=values["lens"],
        cu_query_lens=indices,
        token_to_row=indices[:-1],
        token_rows=values["rows"],
        input_ids=values["input_ids"],
        cache_positions=values["cache_positions"],
        slots=tuple(table[first_slot : first_slot + num_groups]),
        query_lens_cpu=np.ones(num_rows, np.int32),
        len_bounds_cpu=np.full(num_rows, max_len, np.int32),
        lens_cpu=None,
        capture=None,
    )
