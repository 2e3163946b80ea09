"""Forwards of fixed shape through static buffers: on the CPU a stand-in that keeps the contract of
captured graphs, so that what breaks it shows without a GPU.

A batch is padded to the next captured number of rows, its inputs are copied into the buffers that
the graph was captured with, and the output is one buffer that the next replay overwrites. It knows
no decode mode. Buffers are written on the executor's stream only.
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.attention.base import AttentionBackend
from aserve.gpu.forward_batch import ForwardBatch
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.causal_model import CausalModel

STATIC = ("rows", "lens", "query_starts", "owners", "input_ids", "positions")


@dataclass(frozen=True, slots=True)
class Graph:
    """What a captured forward reads and writes; the tensors' addresses never change."""

    inputs: dict[str, Tensor]
    slots: tuple[Tensor, ...]
    output: Tensor  # [rows, hidden]


class GraphRunner:
    __slots__ = ("_attention", "_graphs", "_model", "_sizes")

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        pools: KvPools,
        *,
        sizes: tuple[int, ...],
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"graph sizes are numbers of rows from 1 on, not {sizes}")
        self._model = model
        self._attention = attention
        self._sizes = sorted(set(sizes))
        self._graphs = {size: _capture(model, pools, size) for size in self._sizes}

    def can_run(self, batch: ForwardBatch) -> bool:
        """One token for each row, no more rows than were captured, and nothing to capture."""
        is_decode = batch.num_tokens == batch.num_rows
        return is_decode and batch.num_rows <= self._sizes[-1] and batch.capture is None

    def replay(self, batch: ForwardBatch) -> Tensor:
        """-> hidden states [tokens, hidden] in the graph's own buffer: the next replay overwrites
        them. A plan that was made before stays if padding left it valid; ids and positions are
        refreshed either way.
        """
        size = self._sizes[bisect.bisect_left(self._sizes, batch.num_rows)]
        graph = self._graphs[size]
        padded = batch.padded(size)
        plan = self._attention.plan(padded) if padded.needs_attention_plan() else padded.plan
        for name, buffer in graph.inputs.items():
            buffer.copy_(getattr(padded, name))
        for buffer, slots in zip(graph.slots, padded.slots, strict=True):
            buffer.copy_(slots)
        static = dataclasses.replace(
            padded,
            rows=graph.inputs["rows"],
            lens=graph.inputs["lens"],
            query_starts=graph.inputs["query_starts"],
            owners=graph.inputs["owners"],
            input_ids=graph.inputs["input_ids"],
            positions=graph.inputs["positions"],
            slots=graph.slots,
        )
        attend = self._attention.bind(static, plan)
        hidden = self._model.forward(static.input_ids, static.positions, attend)
        graph.output.copy_(hidden)
        return graph.output[: batch.num_tokens]


def _capture(model: CausalModel, pools: KvPools, size: int) -> Graph:
    where = pools.token_pool.device

    def buffer(num: int) -> Tensor:
        return torch.zeros(num, dtype=torch.int64, device=where)

    inputs = {name: buffer(size + (name == "query_starts")) for name in STATIC}
    return Graph(
        inputs=inputs,
        slots=tuple(buffer(size) for _ in pools.page_tables),
        output=torch.zeros((size, model.hidden_size), dtype=model.dtype, device=where),
    )
