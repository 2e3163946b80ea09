"""A capture is one CUDA graph, and one more for each graph break; a failed one ends its graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.cuda.graphs import capture


class Graphs:
    """Notes what is asked of each graph, by its number."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self._num = 0

    def __call__(self) -> Graph:
        self._num += 1
        return Graph(self._num, self.asked)


class Graph:
    def __init__(self, number: int, asked: list[tuple[int, str]]) -> None:
        self.number = number
        self.asked = asked

    def begin(self) -> None:
        self.asked.append((self.number, "begin"))

    def end(self) -> None:
        self.asked.append((self.number, "end"))

    def abandon(self) -> None:
        self.asked.append((self.number, "abandon"))

    def replay(self) -> None:
        self.asked.append((self.number, "replay"))


def test_a_cut_ends_one_graph_and_begins_the_next_which_is_replayed_after_it_was_told() -> None:
    graphs = Graphs()
    lens, result = torch.tensor([3]), torch.tensor([4])

    def body(graph_break: Callable[[Tensor], None]) -> Tensor:
        graphs.asked.append((0, "lens"))
        graph_break(lens)
        graphs.asked.append((0, "rest"))
        return result

    captured = capture(graphs, body)
    first, second = [(1, "begin"), (0, "lens"), (1, "end")], [(2, "begin"), (0, "rest"), (2, "end")]
    assert graphs.asked == [*first, *second]
    graphs.asked.clear()
    told: list[Tensor] = []

    def on_break(values: Tensor) -> None:
        graphs.asked.append((0, "told"))
        told.append(values)

    assert captured.replay(on_break) is result
    assert graphs.asked == [(1, "replay"), (0, "told"), (2, "replay")]
    assert told == [lens]


@pytest.mark.parametrize("has_cut", [False, True])
def test_the_graph_in_which_a_body_fails_is_abandoned(*, has_cut: bool) -> None:
    graphs = Graphs()

    def body(graph_break: Callable[[Tensor], None]) -> Tensor:
        if has_cut:
            graph_break(torch.zeros(1))
        raise RuntimeError("as the test wants it")

    with pytest.raises(RuntimeError, match="as the test wants it"):
        capture(graphs, body)
    assert graphs.asked[-2:] == [(1 + has_cut, "begin"), (1 + has_cut, "abandon")]
