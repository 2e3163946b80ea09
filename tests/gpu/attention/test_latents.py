"""Latent attention: the expanded and the absorbed form of each row, against the formula."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.latents import (
    LatentBackend,
    LatentPlan,
    is_cheaper_expanded,
    with_latents,
)
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.kv.layer_groups import LayerSpec, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.latent_attention import LatentAttend, LatentInputs, UpProjection
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch
from tests.gpu.attention.backend_parity import Layout, fill, random, spoil_tails
from tests.gpu.attention.test_layer_kinds import causal, dense
from tests.gpu.device_tables import device_batch

HEADS, NOPE, ROPE, VALUE, RANK = 4, 6, 4, 5, 10
LAYER = LayerSpec(
    0, num_heads=HEADS, num_kv_heads=1, head_dim=RANK + ROPE, scale=0.3, value_dim=RANK,
    expanded_dim=NOPE + VALUE,
)  # fmt: skip
# One long prompt, a decode behind many keys, a chunk behind a prefix, a decode at a page's edge.
QUERY_LENS, KV_LENS = [70, 1, 33, 1], [0, 350, 250, 15]


def inputs_of(num_tokens: int, dtype: torch.dtype) -> LatentInputs:
    generator = torch.Generator().manual_seed(5)
    up = UpProjection(
        random(generator, HEADS, NOPE, RANK).to(dtype),
        random(generator, HEADS, VALUE, RANK).to(dtype),
    )
    q = random(generator, num_tokens, HEADS, NOPE + ROPE).to(dtype)
    return LatentInputs(q, random(generator, num_tokens, 1, RANK + ROPE).to(dtype), up)


def filled(layout: Layout, batch: DeviceBatch) -> KvPools:
    pools = layout.pools(len(batch.query_lens_cpu))
    fill(pools, layout, batch)
    spoil_tails(pools, layout, batch)
    return pools


def naive(pools: KvPools, made: ForwardBatch, inputs: LatentInputs) -> Tensor:
    """Plain softmax attention over k and v of each head, row by row."""
    keys, outs, start = pools.layers[0].keys, [], 0
    keys.index_copy_(0, made.slots[0], inputs.latents)
    for row, query_len in enumerate(made.query_lens_cpu.tolist()):
        kv_len = int(made.lens[row])
        slots = pools.slots(0, made.rows[row].expand(kv_len), torch.arange(kv_len))
        c, k_pe = keys[slots, 0].split((RANK, ROPE), dim=-1)
        k_nope = torch.einsum("tr,hdr->thd", c, inputs.up.key)
        v = torch.einsum("tr,hdr->thd", c, inputs.up.value)
        k = torch.cat((k_nope, k_pe[:, None].expand(-1, HEADS, -1)), dim=-1)
        q = inputs.q[start : start + query_len]
        outs.append(dense(q, k, v, causal(query_len, kv_len), scale=LAYER.scale))
        start += query_len
    return torch.cat(outs)


def attend(backend: LatentBackend, made: ForwardBatch, inputs: LatentInputs) -> Tensor:
    bound = backend.bind(made, backend.plan(made))
    assert isinstance(bound, LatentAttend)
    return bound.attend_latents(LAYER, inputs)


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
FORMS = {"absorbed": 1000, "both": 16, "expanded": 1}  # the fewest queries of an expanded row


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_equal_plain_attention_over_expanded_keys(
    form: str, page_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are merged from many tiles; the host knows bounds of the lengths only."""
    monkeypatch.setattr("aserve.gpu.attention.latents.TILE", 48)
    if form == "expanded":
        every = np.ones(len(QUERY_LENS), np.bool_)
        monkeypatch.setattr("aserve.gpu.attention.latents.is_cheaper_expanded", lambda *_: every)
    layout = Layout(LAYER, page_size=page_size, dtype=dtype)
    batch = device_batch(QUERY_LENS, KV_LENS)
    pools = filled(layout, batch)
    made = ForwardBatch.init_new(
        replace(batch, len_bounds_cpu=batch.len_bounds_cpu + np.int32(3)), pools
    )
    inputs = inputs_of(made.num_tokens, dtype)
    backend = LatentBackend(TorchReference(pools), pools, LAYER, min_queries=FORMS[form])
    plan = backend.plan(made)
    assert isinstance(plan, LatentPlan)
    num_expanded = 0 if plan.expanded is None else plan.expanded.batch.num_rows
    assert num_expanded == {"absorbed": 0, "both": 2, "expanded": 4}[form]
    got = attend(backend, made, inputs)
    tolerance = TOLERANCES[dtype]
    expected = naive(pools, made, inputs)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("query_len", "kv_len", "is_expanded"),
    [
        (1, 1, True),
        (1, 2, False),
        (1, 100_000, False),
        (64, 4096, False),
        (200, 4096, True),
        (200, 200, True),
    ],
)
def test_the_form_of_a_row_is_the_cheaper_one(
    query_len: int, kv_len: int, *, is_expanded: bool
) -> None:
    """With the sizes of DeepSeek-V3, a long prefix is expanded for about 170 queries or more."""
    layer = LayerSpec(
        0, num_heads=128, num_kv_heads=1, head_dim=576, scale=1.0, value_dim=512, expanded_dim=256
    )
    lens = np.array([query_len], np.int32), np.array([kv_len], np.int32)
    assert is_cheaper_expanded(layer, *lens).tolist() == [is_expanded]


def test_a_forward_that_was_padded_since_it_was_planned_is_planned_anew() -> None:
    """The plan was made for two rows, and the padded forward has five. The marker asks for a new
    plan; a backend that is given the old one makes a new one itself."""
    layout = Layout(LAYER)
    batch = device_batch([40, 1], [0, 9])
    pools = filled(layout, batch)
    backend = LatentBackend(TorchReference(pools), pools, LAYER, min_queries=16)
    made = ForwardBatch.init_new(batch, pools)
    inputs = inputs_of(made.num_tokens + 3, torch.float64)
    own = LatentInputs(inputs.q[:41], inputs.latents[:41], inputs.up)
    expected = attend(backend, made, own)
    plan = backend.plan(made)
    made.mark_attention_planned(plan, replan_equivalent=True)
    padded = made.padded(5)
    assert padded.needs_attention_plan()
    for stale_or_new in (plan, backend.plan(padded)):
        bound = backend.bind(padded, stale_or_new)
        assert isinstance(bound, LatentAttend)
        got = bound.attend_latents(LAYER, inputs)
        torch.testing.assert_close(got[:41], expected, rtol=1e-12, atol=1e-12)
        alone = inputs.up.value @ pools.layers[0].keys[0, 0, :RANK]  # what padding rows read
        torch.testing.assert_close(got[41:], alone.expand(3, -1, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", [{"is_deterministic": True}, {"layers": False}])
def test_all_rows_are_absorbed_where_forms_must_not_differ(change: dict[str, bool]) -> None:
    sizes = {} if change.get("layers", True) else {"expanded_dim": None}
    layer = msgspec.structs.replace(LAYER, **sizes)
    pools = Layout(layer).pools(1)
    site = AttentionSite(pools, group_layers((layer,)), torch.float64, CpuDevice())
    site = replace(site, is_deterministic=change.get("is_deterministic", False))
    inner = TorchReference(pools)
    assert with_latents(inner, site) is inner
