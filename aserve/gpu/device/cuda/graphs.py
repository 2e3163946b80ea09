"""Captures a body in CUDA graphs: one, and one more for each cut.

It knows no step. Tensors that live across a cut lie in the graphs' pool, which nothing else writes
between two graphs of one body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from aserve.gpu.device.base import Cut
from aserve.gpu.device.cuda.runtime import CudaGraph


def capture(new_graph: Callable[[], CudaGraph], body: Callable[[Cut], Tensor]) -> CudaCaptured:
    """On the stream that captures; `body` has run there before."""
    parts: list[tuple[CudaGraph, Tensor]] = []
    graph = new_graph()

    def cut(values: Tensor) -> None:
        nonlocal graph
        graph.end()
        parts.append((graph, values))
        graph = new_graph()
        graph.begin()

    graph.begin()
    with contextlib.ExitStack() as failing:
        failing.callback(lambda: graph.abandon())
        result = body(cut)
        failing.pop_all()
    graph.end()
    return CudaCaptured(tuple(parts), graph, result)


@dataclass(frozen=True, slots=True)
class CudaCaptured:
    """A `Captured`. It holds what its graphs put out, so that no later capture gets that memory."""

    parts: tuple[tuple[CudaGraph, Tensor], ...]
    last: CudaGraph
    result: Tensor

    def replay(self, on_cut: Cut) -> Tensor:
        for graph, values in self.parts:
            graph.replay()
            on_cut(values)
        self.last.replay()
        return self.result
