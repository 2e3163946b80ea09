"""Layers that differ in what they store, what they read, and which keys a query sees; and drafts
that form a tree. Expected values come from plain softmax over dense tensors."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from torch import Tensor

from aserve.errors import BugError, ConfigError
from aserve.gpu.attention.base import AttentionSite, Capabilities, own_plan
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.attention.select import build_attention
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.layers.rope import RopeInputs, Rotary, apply_rope
from aserve.gpu.layers.rope_scaling import DefaultRope
from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from tests.gpu.attention.backend_parity import layer, random
from tests.gpu.device_tables import CPU, device_batch, make_pools

NO_BLOCKS = ("paged-cpu", "triton")
PAGE_SIZE = 4
LEN = 7  # tokens of the one row
LATENT = LayerSpec(0, num_heads=4, num_kv_heads=1, head_dim=8, scale=0.3, value_dim=6)
ROTARY = Rotary(DefaultRope(100.0), 8, max_model_len=16, dtype=torch.float64, device=CPU)


def pools_of(*layers: LayerSpec, dtype: torch.dtype = torch.float64) -> KvPools:
    """Row 1 has the pages 5, 3, 1 in every group."""
    pools = make_pools(layers, 6, table_shape=(2, 3), page_size=PAGE_SIZE, dtype=dtype)
    for table in pools.page_tables:
        table[1] = torch.tensor([5, 3, 1])
    for kv in pools.layers.values():
        kv.keys[PAGE_SIZE:] = torch.nan  # page 0 is nobody's, and always finite
        kv.values[PAGE_SIZE:] = torch.nan
    return pools


def dense(q: Tensor, keys: Tensor, values: Tensor, is_seen: Tensor, *, scale: float) -> Tensor:
    """q [queries, heads, d], keys and values [keys, kv_heads, d], is_seen [queries, keys]."""
    repeats = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def causal(num_queries: int, num_keys: int) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def test_a_layer_with_a_latent_cache_stores_one_vector_as_key_and_value() -> None:
    """As MLA does: the first elements of the key are the value."""
    pools = pools_of(LATENT)
    stored_bytes = pools.size_bytes - pools.token_pool.nbytes
    assert stored_bytes == 6 * PAGE_SIZE * 8 * 8  # no second pool for values
    layout = group_layers((LATENT,))[0].layout(dtype_bytes=8)
    assert layout.bytes_per_page(PAGE_SIZE) * 6 == pools.size_bytes
    heads = random(torch.Generator().manual_seed(0), LEN, 5, 8)
    backend = TorchReference(pools)
    outputs = []
    for start, stop in ((0, 4), (4, LEN)):  # a chunk, then one behind it
        batch = ForwardBatch.init_new(device_batch([stop - start], [start]), pools)
        outputs.append(backend.bind(batch, None)(LATENT, AttentionInputs(heads[start:stop])))
    q, latents = heads.split((4, 1), dim=1)
    expected = dense(q, latents, latents[..., :6], causal(LEN, LEN), scale=0.3)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["torch-ref", "paged-sdpa"])
def test_a_layer_that_stores_nothing_reads_the_kv_of_another(name: str) -> None:
    storing = layer()
    frozen = msgspec.structs.replace(storing, index=1, kv_layer=0)
    groups = group_layers((storing, frozen))
    pools = pools_of(storing, frozen)
    assert groups[0].layout(8).num_layers == 1
    backend = BACKENDS[name]().build(AttentionSite(pools, groups, torch.float64, CpuDevice()))
    batch = ForwardBatch.init_new(device_batch([LEN], [0]), pools)
    attend = backend.bind(batch, backend.plan(batch))
    generator = torch.Generator().manual_seed(1)
    heads, queries = random(generator, LEN, 8, 8), random(generator, LEN, 4, 8)
    kv = pools.layers[0]
    kv.keys.zero_()
    kv.values.zero_()
    attend(storing, AttentionInputs(heads))
    stored = kv.keys.clone(), kv.values.clone()
    rope = RopeInputs(ROTARY.at(batch.rope_positions))
    got = attend(frozen, AttentionInputs(queries, rope))
    _, keys, values = heads.split((4, 2, 2), dim=1)
    q = apply_rope(queries, rope)
    expected = dense(q, keys, values, causal(LEN, LEN), scale=storing.scale)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(kv.keys, stored[0])
    assert torch.equal(kv.values, stored[1])


@pytest.mark.parametrize("kv_layer", [7, 1, 2])
def test_the_kv_that_a_layer_reads_must_be_stored_in_its_group(kv_layer: int) -> None:
    """Layer 7 does not exist, layer 1 stores nothing, layer 2 is in another group."""
    reader = msgspec.structs.replace(layer(), index=1, kv_layer=kv_layer)
    windowed = msgspec.structs.replace(layer(window=4), index=2)
    with pytest.raises(ConfigError, match=f"layer 1 reads the KV of layer {kv_layer}"):
        pools_of(layer(), reader, windowed)


def seen_by(mask: Mask, window: int | None) -> Tensor:
    """bool [LEN, LEN]; blocks have 3 positions."""
    q, k = torch.arange(LEN)[:, None], torch.arange(LEN)
    admitted = {
        Mask.CAUSAL: k <= q,
        Mask.BLOCK_CAUSAL: k // 3 <= q // 3,
        Mask.NONE: k >= 0,
    }[mask]
    return admitted & ((q - k).abs() < (window or LEN))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("mask", Mask)
def test_a_query_sees_the_keys_that_the_mask_of_its_layer_admits(
    mask: Mask, window: int | None
) -> None:
    spec = msgspec.structs.replace(layer(window=window), mask=mask, block_len=3)
    pools = pools_of(spec)
    made = ForwardBatch.init_new(device_batch([LEN], [0]), pools)
    # The host may know only a bound; what is beyond the length is never seen.
    batch = dataclasses.replace(made, len_bounds_cpu=made.len_bounds_cpu + 4)
    heads = random(torch.Generator().manual_seed(2), LEN, 8, 8)
    got = TorchReference(pools).bind(batch, None)(spec, AttentionInputs(heads))
    q, keys, values = heads.split((4, 2, 2), dim=1)
    expected = dense(q, keys, values, seen_by(mask, window), scale=spec.scale)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *(
            (name, {"mask": Mask.BLOCK_CAUSAL}, r"mask block-causal \(has causal, none\)")
            for name in NO_BLOCKS
        ),
        ("paged-sdpa", {"value_dim": 4, "num_kv_heads": 1}, "latent KV"),
    ],
)
def test_a_backend_is_refused_for_layers_that_it_lacks(
    name: str, changes: dict[str, object], message: str
) -> None:
    spec = msgspec.structs.replace(layer(), **changes)
    pools = pools_of(spec, dtype=torch.float32)
    site = AttentionSite(pools, group_layers((spec,)), torch.float32, CpuDevice())
    with pytest.raises(ConfigError, match=message):
        build_attention(name, site, order=())
    chosen = build_attention("auto", site, order=(name, "torch-ref"))
    assert chosen.name == "torch-ref"


# A draft tree over the tokens 0..4 of one row: 0 -> 1 -> 3 and 0 -> 2 -> 4. Entry t: what t sees.
TREE = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
DEPTHS = [0, 1, 1, 2, 2]
PATH = [0, 2, 4]  # the accepted one
PREFIX = 6


TREE_MASK = torch.tensor([[token in ancestors for token in range(5)] for ancestors in TREE])


def test_a_draft_tree_is_verified_in_one_forward_and_its_accepted_path_compacted() -> None:
    """Each path of the tree gets what it gets as a sequence of its own. After compaction, the next
    token reads the accepted path as if the rejected tokens had never been."""
    specs = (layer(), msgspec.structs.replace(layer(window=9), index=1))
    generator = torch.Generator().manual_seed(3)
    prefix, drafts, after = (random(generator, num, 8, 8) for num in (PREFIX, 5, 1))

    def attend(
        pools: KvPools, heads: Tensor, kv_len: int, overrides: ForwardOverrides
    ) -> list[Tensor]:
        made = ForwardBatch.init_new(device_batch([len(heads)], [kv_len]), pools, overrides)
        pools.token_pool.index_copy_(0, made.slots[0], made.cache_positions.to(torch.int32) + 100)
        run = TorchReference(pools).bind(made, None)
        inputs = AttentionInputs(heads, RopeInputs(ROTARY.at(made.rope_positions)))
        return [run(spec, inputs) for spec in specs]

    plain = ForwardOverrides()
    tree = ForwardOverrides(rope_positions=PREFIX + torch.tensor(DEPTHS), tree_mask=TREE_MASK)
    pools = pools_of(*specs)
    attend(pools, prefix, 0, plain)
    in_tree = attend(pools, drafts, PREFIX, tree)

    alone = pools_of(*specs)
    attend(alone, prefix, 0, plain)
    as_sequence = attend(alone, drafts[PATH], PREFIX, plain)
    for got, expected in zip(in_tree, as_sequence, strict=True):
        torch.testing.assert_close(got[PATH], expected, rtol=1e-12, atol=1e-12)

    rows = torch.ones(len(PATH), dtype=torch.int64)
    accepted, compacted = torch.tensor(PATH) + PREFIX, torch.arange(len(PATH)) + PREFIX
    groups = range(len(pools.page_tables))
    pools.move(
        tuple(pools.slots(group, rows, accepted) for group in groups),
        tuple(pools.slots(group, rows, compacted) for group in groups),
    )
    ids = pools.token_ids(rows[:1], max_len=PREFIX + len(PATH))[0]
    assert ids[PREFIX : PREFIX + len(PATH)].tolist() == [100 + PREFIX + t for t in PATH]
    num = PREFIX + len(PATH)
    compact, never_drafted = (attend(each, after, num, plain) for each in (pools, alone))
    for mine, theirs in zip(compact, never_drafted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_tree_mask_stays_with_its_rows_when_a_batch_is_padded() -> None:
    pools = pools_of(layer())
    overrides = ForwardOverrides(tree_mask=TREE_MASK, rope_positions=torch.tensor(DEPTHS))
    made = ForwardBatch.init_new(device_batch([5], [PREFIX]), pools, overrides)
    run = TorchReference(pools)
    prefix = ForwardBatch.init_new(device_batch([PREFIX], [0]), pools)
    generator = torch.Generator().manual_seed(4)
    run.bind(prefix, None)(layer(), AttentionInputs(random(generator, PREFIX, 8, 8)))
    heads = random(generator, 5, 8, 8)
    expected = run.bind(made, None)(layer(), AttentionInputs(heads))
    padded = made.padded(3)
    more = torch.cat((heads, torch.zeros(2, 8, 8, dtype=heads.dtype)))
    pools.layers[0].values[0] = 0  # slot 0 takes what padding writes
    got = run.bind(padded, None)(layer(), AttentionInputs(more))
    assert torch.equal(got[:5], expected)


def test_a_backend_without_tree_masks_refuses_them() -> None:
    pools = pools_of(layer(), dtype=torch.float32)
    overrides = ForwardOverrides(tree_mask=TREE_MASK)
    made = ForwardBatch.init_new(device_batch([5], [0]), pools, overrides)
    with pytest.raises(BugError, match="supports no tree masks"):
        own_plan(made, "a plan", str)
    site = AttentionSite(pools, group_layers((layer(),)), torch.float32, CpuDevice())
    assert [*Capabilities().refusals(dataclasses.replace(site, has_tree_masks=True))] == [
        "tree masks"
    ]


def test_the_kernels_of_triton_verify_no_tree_where_bits_must_be_the_same() -> None:
    """A node's keys lie at other places than those of a decode, so its sums have another order."""
    pools = pools_of(layer(), dtype=torch.float32)
    site = AttentionSite(
        pools, group_layers((layer(),)), torch.float32, CpuDevice(), is_deterministic=True
    )
    assert build_attention("triton", site, order=()).name == "triton"
    with pytest.raises(ConfigError, match="other bits than those of plain decoding"):
        build_attention("triton", dataclasses.replace(site, has_tree_masks=True), order=())
