"""Sparse attention: the choice of keys, and attention to the chosen keys, against plain torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.select import build_attention, load_backend
from aserve.gpu.attention.slots import Chosen, attend_slots, score_keys
from aserve.gpu.attention.sparse import SparseBackend, SparsePlan
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.kv.layer_groups import LayerSpec, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.indexer import Indexer, IndexInputs, IndexShape, best_keys
from aserve.gpu.models.latent_attention import SparseAttend, attend_latents
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.paged_rows import PagedRows
from tests.fakes.drafters import Stumbling, speculative
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import HashModel
from tests.gpu.attention.backend_parity import Layout, random
from tests.gpu.attention.test_latents import (
    HEADS,
    KV_LENS,
    LAYER,
    QUERY_LENS,
    filled,
    inputs_of,
)
from tests.gpu.attention.test_layer_kinds import causal, dense
from tests.gpu.device_tables import device_batch, make_pools
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens
from tests.on_device import OnDevice

INDEX_DIM, INDEX_HEADS = 6, 3


def sparse_layer(top_k: int) -> LayerSpec:
    return msgspec.structs.replace(LAYER, index_dim=INDEX_DIM, index_top_k=top_k)


def site_of(layer: LayerSpec, pools: KvPools, dtype: torch.dtype) -> AttentionSite:
    return AttentionSite(pools, group_layers((layer,)), dtype, CpuDevice())


def index_of(num_tokens: int, dtype: torch.dtype, seed: int = 8) -> IndexInputs:
    generator = torch.Generator().manual_seed(seed)
    return IndexInputs(
        random(generator, num_tokens, INDEX_HEADS, INDEX_DIM).to(dtype),
        random(generator, num_tokens, INDEX_HEADS).to(dtype),
        random(generator, num_tokens, INDEX_DIM).to(dtype),
    )


@given(
    st.lists(st.sampled_from([-2.5, -0.0, 0.0, 1.0, 1.0000001, 3e30]), min_size=1, max_size=12),
    st.integers(1, 14),
    st.integers(0, 3),
)
@settings(max_examples=200)
def test_the_best_keys_are_those_of_a_stable_sort_however_wide_the_scores_are(
    values: list[float], count: int, num_behind: int
) -> None:
    scores = torch.tensor([[*values, *([torch.nan] * num_behind)]])
    is_seen = torch.arange(scores.shape[1]) < len(values)
    found = best_keys(scores, is_seen, count)[0].tolist()
    stable = torch.tensor(values).sort(descending=True, stable=True).indices[:count]
    expected = sorted(stable.tolist())
    assert found == expected + [scores.shape[1]] * (len(found) - len(expected))
    assert len(found) == min(count, scores.shape[1])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["torch-ref", "paged-cpu"])
def test_rows_attend_to_the_keys_of_the_largest_scores(
    name: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks behind prefixes beside decodes, dense rows beside sparse ones; queries are computed a
    few at a time, and the host knows bounds of the lengths only."""
    monkeypatch.setattr("aserve.gpu.attention.slots.MAX_ELEMENTS", 4000)
    dtype, top_k = torch.float32, 40
    layer = sparse_layer(top_k)
    batch = device_batch(QUERY_LENS, KV_LENS)
    pools = filled(Layout(layer, page_size=page_size, dtype=dtype), batch)
    site = site_of(layer, pools, dtype)
    backend = build_attention(name, site, order=()).backend
    assert isinstance(backend, SparseBackend)
    # The index keys of earlier tokens come with a forward of their own.
    history = index_of(sum(KV_LENS), dtype, seed=9)
    before = ForwardBatch.init_new(device_batch(KV_LENS, [0] * 4), pools)
    backend.index_keys.store(layer, history.keys, before.slots[0])
    made = ForwardBatch.init_new(
        replace(batch, len_bounds_cpu=batch.len_bounds_cpu + np.int32(3)), pools
    )
    inputs, index = inputs_of(made.num_tokens, dtype), index_of(made.num_tokens, dtype)
    plan = backend.plan(made)
    assert isinstance(plan, SparsePlan)
    assert plan.dense is not None
    assert plan.dense.batch.num_rows == 1
    attend = backend.bind(made, plan)
    assert isinstance(attend, SparseAttend)
    got = attend.attend_sparse(layer, inputs, index)

    keys, outs, start, past = pools.layers[0].keys, [], 0, 0
    for row, (query_len, kv_len) in enumerate(zip(QUERY_LENS, KV_LENS, strict=True)):
        own = slice(start, start + query_len)
        total = kv_len + query_len
        slots = pools.slots(0, made.rows[row].expand(total), torch.arange(total))
        latents = keys[slots]
        indexed = torch.cat((history.keys[past : past + kv_len], index.keys[own]))
        seen = causal(query_len, total)
        scores = index.select(own).scores(indexed).masked_fill(~seen, -torch.inf)
        best = scores.argsort(dim=1, descending=True, stable=True)[:, :top_k]
        seen = seen & torch.zeros_like(seen).scatter_(1, best, value=True)
        q = inputs.up.absorb(inputs.q[own])
        k = latents.expand(-1, HEADS, -1)
        values = dense(q, k, k[..., : layer.out_dim], seen, scale=layer.scale)
        outs.append(inputs.up.values(values))
        start, past = own.stop, past + kv_len
    torch.testing.assert_close(got, torch.cat(outs), rtol=1e-4, atol=1e-5)


def test_with_fewer_keys_than_top_k_it_is_the_dense_model_bit_by_bit() -> None:
    layer = sparse_layer(1000)
    batch = device_batch(QUERY_LENS, KV_LENS)
    outs: list[Tensor] = []
    for own in (layer, LAYER):
        pools = filled(Layout(own), batch)
        site = site_of(own, pools, torch.float64)
        backend = build_attention("torch-ref", replace(site, is_deterministic=False), order=())
        made = ForwardBatch.init_new(batch, pools)
        inputs = inputs_of(made.num_tokens, torch.float64)
        attend = backend.backend.bind(made, backend.backend.plan(made))
        if isinstance(attend, SparseAttend):
            index = index_of(made.num_tokens, torch.float64)
            outs.append(attend.attend_sparse(layer, inputs, index))
        else:
            outs.append(attend_latents(attend, LAYER, inputs))
    assert torch.equal(*outs)


KERNELS = [
    ("paged-cpu", "cpu"),
    ("triton", "cpu"),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
]


@pytest.fixture
def where(device: str) -> Iterator[None]:
    """What a test makes is there."""
    with contextlib.nullcontext() if device == "cpu" else OnDevice(torch.device(device)):
        yield


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize(("name", "device"), KERNELS)
def test_kernels_attend_to_chosen_slots_as_plain_torch_does(name: str, device: str) -> None:
    """Queries with one key, with some, and with all; behind them the slots are slot 0."""
    dtype, most = torch.float32, 37
    pools = Layout(LAYER, dtype=dtype).pools(3)
    kv, site = pools.layers[0], site_of(LAYER, pools, dtype)
    generator = torch.Generator().manual_seed(3)
    kv.keys.copy_(random(generator, *kv.keys.shape))
    lens = torch.tensor([1, 9, most, 36])
    slots = torch.randint(1, len(kv.keys), (4, most), generator=generator)
    slots *= torch.arange(most) < lens[:, None]
    kv.keys[0] = torch.nan  # slot 0 holds anything
    q = random(generator, 4, HEADS, LAYER.head_dim).to(dtype)
    chosen = Chosen(slots, lens)
    kernel = load_backend(name).make_sparse_ops(site).attend_slots
    got, expected = (attend(q, kv, chosen, LAYER) for attend in (kernel, attend_slots))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("where")
@pytest.mark.parametrize(("name", "device"), KERNELS)
def test_kernels_score_the_keys_of_pages_as_plain_torch_does(
    name: str, device: str, dtype: torch.dtype
) -> None:
    """Tokens with one key, with as many as a tile has, and with as many as the bound; two of them
    are in one row. Queries are parts of a wider tensor, as an indexer makes them."""
    lens = torch.tensor([1, 64, 65, 150, 149])
    num_tokens, dim, most = len(lens), 40, 150
    layer = msgspec.structs.replace(LAYER, index_dim=dim, index_top_k=3)
    pools = make_pools((layer,), 60, page_size=4, table_shape=(6, 40), dtype=dtype)
    pools.page_tables[0].copy_(torch.arange(240).view(6, 40).remainder(59) + 1)
    generator = torch.Generator().manual_seed(4)
    keys = random(generator, 240, dim).to(dtype)
    keys[:4] = torch.nan  # page 0 holds anything
    joined = random(generator, num_tokens, 7, dim).to(dtype)
    index = IndexInputs(joined[:, :-1], random(generator, num_tokens, 6).to(dtype), joined[:, -1])
    paged = PagedRows(
        pools.page_tables[0], 4, torch.tensor([5, 1, 2, 4, 4]), lens,
        torch.arange(num_tokens + 1), max_len=most,
    )  # fmt: skip
    kernel = load_backend(name).make_sparse_ops(site_of(layer, pools, dtype)).score_keys
    got, expected = (score(index, keys, paged) for score in (kernel, score_keys))
    is_seen = torch.arange(most) < lens[:, None]
    assert bool(expected[is_seen].isfinite().all())
    torch.testing.assert_close(got[is_seen], expected[is_seen], rtol=1e-4, atol=1e-4)
    assert got.dtype == torch.float32


class Matrices:
    """Weights by their names, where a test gives them."""

    def __init__(self, **matrices: Tensor) -> None:
        self._matrices = matrices

    def linear(self, parts: dict[str, int], **_: object) -> Any:
        weight = self._matrices[next(iter(parts)).removeprefix("indexer.")]
        return lambda x: x @ weight.T

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)


def test_rope_rotates_index_heads_by_halves_and_leaves_the_rest() -> None:
    """The attention of the same layer rotates neighbours: mixed up, scores look plausible and the
    choice of keys is wrong from the second position on."""
    eye = torch.eye(6)
    source: Any = Matrices(wq_b=eye, wk=eye, weights_proj=torch.ones(1, 6))
    shape = IndexShape(index_n_heads=1, index_head_dim=6, index_topk=2)
    indexer = Indexer("indexer", source, shape=shape, sizes=(6, 6))
    angles = torch.tensor([[0.3, 1.1]])
    x = torch.tensor([[1.0, 2.0, -3.0, 4.0, 5.0, 6.0]])
    index = indexer(x, x, torch.cat((angles.cos(), angles.sin()), dim=1))
    turned = torch.polar(torch.ones(2), angles[0]) * torch.complex(x[0, :2], x[0, 2:4])
    expected = torch.cat((turned.real, turned.imag, x[0, 4:]))
    torch.testing.assert_close(index.q[0, 0], expected)
    normed = torch.nn.functional.layer_norm(x[0], (6,), eps=1e-6)
    torch.testing.assert_close(index.keys[0, 4:], normed[4:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"has_tree_masks": True}, "does not support tree masks"),
        ({"is_deterministic": True}, "does not support --deterministic with sparse attention"),
        ({"layers": "mixed"}, "supports indexers in all layers or in none"),
    ],
)
def test_what_sparse_attention_lacks_is_refused(change: dict[str, Any], message: str) -> None:
    layers: tuple[LayerSpec, ...] = (sparse_layer(4), msgspec.structs.replace(LAYER, index=1))
    if change.pop("layers", None) is None:
        layers = layers[:1]
    pools = make_pools(layers, 4, table_shape=(3, 4), dtype=torch.float32)
    site = AttentionSite(pools, group_layers(layers), torch.float32, CpuDevice(), **change)
    with pytest.raises(ConfigError, match=message):
        build_attention("paged-cpu", site, order=())


@pytest.mark.parametrize(("top_k", "page_size"), [(3, 4), (9, 1)])
def test_rows_that_grow_beyond_top_k_have_the_tokens_of_the_plain_engine(
    top_k: int, page_size: int
) -> None:
    """Each row is dense at first and sparse from its key `top_k` + 1 on; some are retracted."""
    model = HashModel(is_latent=True, top_k=top_k)
    asked = [request(f"r{n}", [5, 7, *range(3 * n)], max_tokens=16) for n in range(4)]
    options: dict[str, Any] = {
        "page_size": page_size,
        "num_pages": 1 + 44 // page_size,
        "max_batched_tokens": 8,
    }
    served = serve(make_executor(model, attention="torch-ref", **options), asked)
    assert served.outputs == plain_tokens(asked, model)
    assert served.num_retracted > 0


@pytest.mark.parametrize("has_drafts", [False, True])
def test_captured_steps_have_the_tokens_of_the_plain_engine(*, has_drafts: bool) -> None:
    """Graphs that were captured once are replayed for rows shorter than `top_k` and longer."""
    model, device = HashModel(is_latent=True, top_k=7), GraphDevice()
    asked = [request(f"r{n}", [5, 7, *range(3 * n)], max_tokens=16) for n in range(4)]
    executor = make_executor(
        model,
        attention="torch-ref",
        device=device,
        graph_rows=4,
        mode=speculative(Stumbling(4)) if has_drafts else None,
    )
    served = serve(captured(executor), asked)
    assert served.outputs == plain_tokens(asked, model)
    assert device.num_replays > 5
