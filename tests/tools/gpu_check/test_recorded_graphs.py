"""The stand-in for captured graphs keeps their contract: addresses and host values as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tools.gpu_check.recorded_graphs import RecordingCpu, record


def no_cut(values: Tensor) -> None:
    raise AssertionError("this body has no graph break")


def test_a_replay_reads_and_writes_the_tensors_of_the_capture() -> None:
    words, table = torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64)

    def body(graph_break: Callable[[Tensor], None]) -> Tensor:
        rows = words[1:] - 1
        table.index_copy_(0, rows, words[:2] * 10)
        rows += 1
        return torch.stack((rows, table[1:]))

    captured = RecordingCpu().capture(body)
    words.copy_(torch.tensor([4, 3, 1]))
    assert captured.replay(no_cut).tolist() == [[3, 1], [10, 40]]
    assert table.tolist() == [30, 10, 40]


def test_what_a_body_reads_of_the_host_is_that_of_the_capture() -> None:
    host = {"iteration": 1}
    captured = RecordingCpu().capture(lambda graph_break: torch.zeros(1) + host["iteration"])
    host["iteration"] = 2
    assert captured.replay(no_cut).tolist() == [1.0]


def test_the_next_replay_overwrites_the_result() -> None:
    word = torch.tensor([1])
    captured = RecordingCpu().capture(lambda graph_break: word * 2)
    first = captured.replay(no_cut)
    word.fill_(7)
    captured.replay(no_cut)
    assert first.tolist() == [14]


def test_a_cut_is_called_between_what_is_before_and_what_is_after() -> None:
    word, table = torch.tensor([1]), torch.zeros(1, dtype=torch.int64)
    seen: list[tuple[list[int], list[int]]] = []

    def body(graph_break: Callable[[Tensor], None]) -> Tensor:
        lens = word + 1
        graph_break(lens)
        table.add_(lens)
        return table * 10

    captured = record(body)
    table.zero_()
    word.fill_(4)
    result = captured.replay(lambda values: seen.append((values.tolist(), table.tolist())))
    assert seen == [([5], [0])]
    assert result.tolist() == [50]


MASK = torch.tensor([True, False])


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[MASK],
        lambda x: x.index_put_((MASK,), x[:1]),
        lambda x: x.masked_select(MASK),
        lambda x: torch.equal(x, x),
    ],
)
def test_a_body_that_asks_for_a_value_cannot_be_captured(ask: Callable[[Tensor], object]) -> None:
    x = torch.ones(2)

    def body(graph_break: Callable[[Tensor], None]) -> Tensor:
        ask(x)
        return x

    with pytest.raises(RuntimeError, match="cannot be captured"):
        RecordingCpu().capture(body)
