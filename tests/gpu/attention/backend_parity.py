"""Compares an attention backend with the torch reference on all shapes that a step can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionBackend, AttentionSite
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.device.base import Device
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, group_layers
from aserve.gpu.kv.pools import KvPools, LayerKv
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch, ForwardOverrides
from tests.gpu.device_tables import device_batch, make_pools

MAX_LEN = 400

# (query lengths, KV lengths before them)
SHAPES = {
    "no row": ([], []),
    "one token": ([1], [0]),
    "one decode": ([1], [9]),
    "a page's last slot": ([1], [15]),
    "a page's first slot": ([1], [16]),
    "a whole page": ([16], [0]),
    "a page and one": ([17], [0]),
    "fresh prompt": ([23], [0]),
    "chunk": ([7], [30]),
    "decodes of all lengths": ([1] * 6, [0, 3, 15, 16, 31, 70]),
    "decodes of very different lengths": ([1] * 4, [2, 350, 66, 15]),
    "even spans": ([2, 2, 2], [5, 0, 31]),
    "verify windows": ([3, 1, 3, 2], [9, 16, 0, 14]),
    "long prompts beside a decode and a chunk": ([300, 1, 270, 7], [0, 20, 0, 30]),
    "mixed": ([1, 40, 1, 3, 9], [20, 0, 16, 13, 250]),
}
HEAD_DIM = 8
HEADS = [(2, 2), (4, 2), (6, 1)]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Layout:
    layer: LayerSpec
    page_size: int = 16
    dtype: torch.dtype = torch.float64
    kv_dtype: torch.dtype | None = None  # if it is another

    def pools(self, num_rows: int) -> KvPools:
        """Pools whose slots are NaN, except page 0."""
        num_columns = MAX_LEN // self.page_size + 1
        pools = make_pools(
            (self.layer,),
            num_columns * num_rows + 2,
            table_shape=(num_rows + 1, num_columns),
            page_size=self.page_size,
            dtype=self.kv_dtype or self.dtype,
        )
        kv = pools.layers[self.layer.index]
        for tensor in pools_of(kv):
            tensor[self.page_size :] = torch.nan
        return pools


def layer(
    *,
    heads: tuple[int, int] = (4, 2),
    window: int | None = None,
    softcap: float | None = None,
    head_dim: int = HEAD_DIM,
) -> LayerSpec:
    return LayerSpec(
        index=0,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        scale=0.4 * (HEAD_DIM / head_dim) ** 0.5,
        window=window,
        softcap=softcap,
    )


def latent_layer(
    num_heads: int = 5, *, value_dim: int = 24, rope_dim: int = 8, softcap: float | None = None
) -> LayerSpec:
    """A layer that keeps latents."""
    return LayerSpec(
        index=0,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=value_dim + rope_dim,
        scale=0.2,
        softcap=softcap,
        value_dim=value_dim,
    )


def pools_of(kv: LayerKv) -> tuple[Tensor, ...]:
    """Keys and values, or latents alone."""
    return (kv.keys,) if kv.keys.data_ptr() == kv.values.data_ptr() else (kv.keys, kv.values)


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def fill(pools: KvPools, layout: Layout, batch: DeviceBatch) -> None:
    """Gives every row scattered pages up to its length after the step, with random KV in them."""
    generator = torch.Generator().manual_seed(1)
    kv = pools.layers[0]
    ends = batch.len_bounds_cpu.tolist()
    next_page = pools.num_pages[0] - 1
    for row, end in enumerate(ends, start=1):
        for column in range(-(-end // layout.page_size)):
            for table in pools.page_tables:
                table[row, column] = next_page
            part = slice(next_page * layout.page_size, (next_page + 1) * layout.page_size)
            for tensor in pools_of(kv):
                tensor[part] = random(generator, *tensor[part].shape).to(tensor.dtype)
            next_page -= 1


def spoil_tails(pools: KvPools, layout: Layout, batch: DeviceBatch) -> None:
    """Writes NaN behind each row's length in its last page, as earlier requests may leave it."""
    for row, end in enumerate(batch.len_bounds_cpu.tolist(), start=1):
        used = end % layout.page_size
        if used:
            page = int(pools.page_tables[-1][row, end // layout.page_size])
            tail = slice(page * layout.page_size + used, (page + 1) * layout.page_size)
            pools.layers[0].keys[tail] = torch.nan
            pools.layers[0].values[tail] = torch.nan


def attended(
    backend: AttentionBackend, layout: Layout, batch: ForwardBatch, plan: object = None
) -> Tensor:
    """The backend's output for random heads. `plan` replaces a plan made for this batch."""
    generator = torch.Generator().manual_seed(2)
    heads = layout.layer.num_heads + layout.layer.num_stored_heads
    qkv = random(generator, batch.num_tokens, heads, layout.layer.head_dim).to(layout.dtype)
    sinks = random(generator, layout.layer.num_heads) if layout.layer.has_sinks else None
    attend = backend.bind(batch, plan or backend.plan(batch))
    return attend(layout.layer, AttentionInputs(qkv, sinks=sinks))


def built(name: str, layout: Layout, pools: KvPools) -> AttentionBackend:
    site = AttentionSite(pools, group_layers((layout.layer,)), layout.dtype, CpuDevice())
    return BACKENDS[name]().build(site)


def assert_parity(name: str, layout: Layout, shape: str, *, has_trees: bool = False) -> None:
    """Compares the named backend with the reference; `shape` is a key of SHAPES. With `has_trees`,
    the queries of short rows form draft trees."""

    def build(pools: KvPools) -> AttentionBackend:
        return built(name, layout, pools)

    whole_pages = BACKENDS[name]().capabilities.whole_pages
    assert_attends(build, layout, shape, whole_pages=whole_pages, has_trees=has_trees)


def assert_attends(
    build: Callable[[KvPools], AttentionBackend],
    layout: Layout,
    shape: str,
    *,
    whole_pages: bool = False,
    has_trees: bool = False,
) -> None:
    """Compares the built backend with the reference."""
    query_lens, kv_lens = SHAPES[shape]
    batch = replace(device_batch(query_lens, kv_lens), is_exact=True)
    pools = layout.pools(len(query_lens))
    fill(pools, layout, batch)
    if not whole_pages:
        spoil_tails(pools, layout, batch)
    overrides = ForwardOverrides(tree_mask=random_trees(query_lens) if has_trees else None)
    made = ForwardBatch.init_new(batch, pools, overrides)
    got = attended(build(pools), layout, made)
    expected = attended(TorchReference(pools), layout, made)
    assert got.shape == (sum(query_lens), layout.layer.num_heads, layout.layer.out_dim)
    tolerance = TOLERANCES[layout.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert bool(got.isfinite().all())


def random_trees(query_lens: list[int]) -> Tensor:
    """bool [tokens, longest query], as in ForwardBatch: a random tree over each row of at most 16
    queries, and a chain over each longer one. The columns behind a row's queries hold anything."""
    generator = torch.Generator().manual_seed(4)
    masks = torch.rand(sum(query_lens), max(query_lens), generator=generator) < 0.5
    start = 0
    for query_len in query_lens:
        for node in range(query_len):
            row = masks[start + node, :query_len]
            row[:] = torch.arange(query_len) == node
            if node > 0:
                is_tree = query_len <= 16
                parent = torch.randint(node, (), generator=generator) if is_tree else node - 1
                row |= masks[start + parent, :query_len]
        start += query_len
    return masks


def scattered_site(
    layers: tuple[LayerSpec, ...],
    table_shape: tuple[int, int],
    *,
    page_size: int,
    dtype: torch.dtype = torch.float64,
    kv_dtype: torch.dtype | None = None,
    device: Device | None = None,
    num_shared: int = 0,
) -> AttentionSite:
    """Rows with as many scattered pages as their table has columns, full of random KV; they share
    the first `num_shared`."""
    device = device or CpuDevice()
    num_rows, columns = table_shape
    pools = make_pools(
        layers,
        num_rows * columns + 1,
        table_shape=(num_rows + 1, columns),
        page_size=page_size,
        dtype=kv_dtype or dtype,
        device=device.torch_device,
    )
    generator = torch.Generator().manual_seed(0)
    for kv in pools.layers.values():
        for pool in (kv.keys, kv.values):
            pool.copy_(torch.randn(pool.shape, generator=generator).to(pool.device, pool.dtype))
    for table in pools.page_tables:
        pages = 1 + torch.randperm(num_rows * columns, generator=generator)
        table[1:] = pages.view(table_shape).to(table.device)
        table[2:, :num_shared] = table[1, :num_shared].clone()
    return AttentionSite(pools, group_layers(layers), dtype, device)


def exact_batch(
    pools: KvPools, query_lens: list[int], kv_lens: list[int], *, num_shared: int = 0
) -> ForwardBatch:
    """The host knows its exact lengths, as without speculation."""
    batch = device_batch(query_lens, kv_lens, device=pools.device)
    return ForwardBatch.init_new(replace(batch, is_exact=True, shared_pages=num_shared), pools)


def draw_heads(site: AttentionSite, spec: LayerSpec, num_tokens: int) -> Tensor:
    sizes = (num_tokens, spec.num_heads + spec.num_stored_heads, spec.head_dim)
    return random(torch.Generator().manual_seed(1), *sizes).to(site.pools.device, site.dtype)


def assert_site_parity(
    backend: AttentionBackend, site: AttentionSite, batch: ForwardBatch, plan: object = None
) -> None:
    """Compares all layers with the reference. `plan` replaces a plan made for this batch."""
    ours = backend.bind(batch, plan or backend.plan(batch))
    theirs = TorchReference(site.pools).bind(batch, None)
    tolerance = TOLERANCES.get(site.dtype, 3e-2)
    for spec in site.layers:
        inputs = AttentionInputs(draw_heads(site, spec, batch.num_tokens))
        got, expected = ours(spec, inputs), theirs(spec, inputs)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
