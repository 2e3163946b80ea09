"""The memory that is kept back for graphs is that of all graphs that a start captures."""

from __future__ import annotations

import pytest

from aserve.gpu.cudagraph.limits import GRAPH_BYTES, GraphLimits
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import HashModel
from tests.gpu.drive import make_executor


@pytest.mark.parametrize(("rows", "tokens"), [(4, 64), (8, None), (2, 200)])
def test_the_driver_has_room_for_every_graph_of_the_start(rows: int, tokens: int | None) -> None:
    """Else the KV cache has taken it, and the captures end for lack of memory."""
    executor = make_executor(
        HashModel(), device=GraphDevice(), graph_rows=rows, piece_tokens=tokens, max_rows=rows
    )
    totals: list[int] = []
    executor.capture_graphs(lambda _done, total: totals.append(total))
    reserved = GraphLimits(rows, tokens).reserved_bytes
    assert reserved % GRAPH_BYTES == 0
    assert 0 < totals[-1] <= reserved // GRAPH_BYTES <= 2 * totals[-1]


def test_a_device_without_graphs_keeps_nothing_back() -> None:
    limits = GraphLimits.of(GraphDevice(), 0, 64, max_rows=8, max_tokens=64)
    assert (limits.rows, limits.tokens, limits.reserved_bytes) == (0, None, 0)
