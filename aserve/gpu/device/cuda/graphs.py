"""Captures a function in CUDA graphs: one graph, and one more for each graph break.

Tensors that live across a break lie in the graphs' memory pool, which nothing else writes between
two graphs of one capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from aserve.gpu.device.base import GraphBreak
from aserve.gpu.device.cuda.runtime import CudaGraph


def capture(
    new_graph: Callable[[], CudaGraph], body: Callable[[GraphBreak], Tensor]
) -> CudaCaptured:
    """Captures on the current stream, on which `body` has run once before."""
    parts: list[tuple[CudaGraph, Tensor]] = []
    graph = new_graph()

    def graph_break(values: Tensor) -> None:
        nonlocal graph
        graph.end()
        parts.append((graph, values))
        graph = new_graph()
        graph.begin()

    graph.begin()
    with contextlib.ExitStack() as failing:
        failing.callback(lambda: graph.abandon())
        result = body(graph_break)
        failing.pop_all()
    graph.end()
    return CudaCaptured(tuple(parts), graph, result, body)


@dataclass(frozen=True, slots=True)
class CudaCaptured:
    """A `Captured`. It keeps the outputs of its graphs alive, so that no later capture reuses their
    memory, and `body`, because the graphs read what that has from outside at the same addresses."""

    parts: tuple[tuple[CudaGraph, Tensor], ...]
    last: CudaGraph
    result: Tensor
    body: Callable[[GraphBreak], Tensor]

    def replay(self, on_break: GraphBreak) -> Tensor:
        for graph, values in self.parts:
            graph.replay()
            on_break(values)
        self.last.replay()
        return self.result
