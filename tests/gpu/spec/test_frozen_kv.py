"""A drafter with queries only: it reads the target's KV and leaves it as it is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.layers.linear import Linear
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.spec.base import DraftRows, Drafts
from aserve.gpu.spec.checkpoint import read_draft_config
from aserve.gpu.spec.frozen_kv import ClusteredHead, FrozenKv, layers_of
from aserve.gpu.weights.inventory import Inventory
from aserve.tiny import DRAFTERS_DIR
from tests.fakes.hash_model import HashModel
from tests.gpu.drive import request
from tests.gpu.spec.test_bundled_drafters import PROMPTS, run


def test_drafting_leaves_the_targets_kv_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, num_tokens = FrozenKv.draft, []

    def checked(self: FrozenKv, runner: StepRunner, rows: DraftRows) -> Drafts:
        pools = runner.state.pools
        before = [pool.clone() for kv in pools.layers.values() for pool in (kv.keys, kv.values)]
        drafts = draft(self, runner, rows)
        after = [pool for kv in pools.layers.values() for pool in (kv.keys, kv.values)]
        assert all(map(torch.equal, before, after))
        num_tokens.append(drafts.tokens.numel())
        return drafts

    monkeypatch.setattr(FrozenKv, "draft", checked)
    run([request("r", PROMPTS[0], max_tokens=12)], algorithm="FROZEN_KV_MTP")
    assert sum(num_tokens) >= 4


def test_each_layer_reads_the_targets_last_layer_of_its_kind() -> None:
    config = read_draft_config(DRAFTERS_DIR / "frozen_kv")
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8}
    config = dataclasses.replace(
        config, head_dim=8, num_heads=4, fields=Fields(kinds, source="config.json")
    )
    target = HashModel(window=6)
    assert [(layer.kv_layer, layer.window) for layer in layers_of(config, target)] == [
        (1, 6),
        (0, None),
    ]
    with pytest.raises(ConfigError, match="layer 0 has sliding_attention"):
        layers_of(config, HashModel())
    with pytest.raises(ConfigError, match="4 heads of 16 elements, but reads 1 KV heads of 8"):
        layers_of(dataclasses.replace(config, head_dim=16), target)


def test_a_clustered_head_admits_the_tokens_of_the_best_clusters() -> None:
    fields = Fields({"num_centroids": 3, "centroid_intermediate_top_k": 1}, source="c")
    ordering = torch.tensor([4, 1, 0, 5, 2, 3])  # three clusters of two tokens
    head = ClusteredHead(fields, ordering, Inventory(torch.float32), hidden_size=3)
    head._centroids = Linear(torch.eye(3))
    hidden = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    masked = head.masked(torch.arange(12.0).view(2, 6), hidden)
    infinite = -torch.inf
    assert masked.tolist() == [
        [0.0, infinite, infinite, infinite, infinite, 5.0],
        [infinite, 7.0, infinite, infinite, 10.0, infinite],
    ]
    with pytest.raises(ConfigError, match="a divisor of 5 tokens"):
        ClusteredHead(fields, ordering[:5], Inventory(torch.float32), hidden_size=3)
