"""Drafts that form a tree, on the real executor under the real scheduler."""

from __future__ import annotations

import pytest

from aserve.messages.base import array_i32
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.tree_mode import TREE, TreeOfDrafts
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs

STEM = [(7 * i * i + 3 * i) % VOCAB for i in range(20)]


@pytest.mark.parametrize(("depth", "lead"), [(1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepted_paths_of_a_tree_give_the_tokens_of_the_plain_engine(
    depth: int, lead: int, temperature: float
) -> None:
    mode = TreeOfDrafts()
    asked = [
        request(f"r{number}", STEM[number : number + 7], max_tokens=24, temperature=temperature)
        for number in range(3)
    ]
    executor = make_executor(
        HashModel(), mode=mode, attention="torch-ref", depth=depth, lead=lead, page_size=4
    )
    served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(HashModel(), r) for r in asked}
    windows = [batch.verify for batch in served.batches if batch.verify]
    assert all(window.tree == TREE for window in windows)
    num_windows = sum(int((array_i32(window.num_drafts) > 0).sum()) for window in windows)
    assert 0 < num_windows < 3 * 23
    assert mode.num_moved > num_windows // 2
