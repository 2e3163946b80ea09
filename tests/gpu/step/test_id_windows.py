"""The ids before each token. tests/gpu/test_traces.py has them under the real scheduler."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from aserve.gpu.step.id_windows import id_windows
from tests.gpu.device_tables import device_batch, paged

# Node 0 is the root, 3 is a child of 1, and 4 is a child of 2.
TREE = {0: (), 1: (0,), 2: (0,), 3: (0, 1), 4: (0, 2)}


@pytest.mark.parametrize("kv_len", [0, 1, 6])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ids_before_a_token_are_those_of_its_path(kv_len: int, size: int, *, is_tree: bool) -> None:
    """A prompt's chunk or a chain sees the tokens before it, and a node of a tree its ancestors,
    even where columns of others follow in the mask. The id of each slot is its number."""
    pools = paged()
    pools.token_pool.copy_(torch.arange(len(pools.token_pool)))
    num_nodes = len(TREE)
    paths = TREE if is_tree else {node: tuple(range(node)) for node in TREE}
    batch = ForwardBatch.init_new(device_batch([num_nodes], [kv_len]), pools)
    if is_tree:
        mask = torch.ones((num_nodes, num_nodes + 2), dtype=torch.bool)
        for node, path in TREE.items():
            mask[node, :num_nodes] = torch.isin(
                torch.arange(num_nodes), torch.tensor([*path, node])
            )
        batch = batch.overridden(ForwardOverrides(tree_mask=mask))
    slots = pools.slots(0, torch.ones(kv_len + num_nodes).long(), torch.arange(kv_len + num_nodes))
    ids = slots.tolist()
    for node, window in enumerate(id_windows(batch, pools, size).tolist()):
        before = ids[:kv_len] + [ids[kv_len + other] for other in paths[node]]
        expected = [*reversed(before), *[-1] * size][: size - 1]
        assert window == [int(batch.input_ids[node]), *expected]
