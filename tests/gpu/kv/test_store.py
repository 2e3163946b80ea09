"""How keys and values are stored: the kernels of the devices against torch, and KV in another dtype
than the model's."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.config import KvOptions
from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.build import BuildOptions, build_on
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.ops import FEW_ELEMENTS
from aserve.gpu.device.cuda.ops import triton_store
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import (
    KV_DTYPES,
    from_kv_dtype,
    kv_dtype_name,
    kv_dtype_of,
    rope_then_store_kv,
    to_kv_dtype,
)
from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.layers.rope import RopeInputs, Rotary
from aserve.gpu.layers.rope_scaling import DefaultRope
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import array_f32
from aserve.options.option import options_of
from aserve.tiny import MODEL_DIR
from aserve_kernels import rope_and_store_kv
from tests.fakes.hash_model import HashModel
from tests.gpu.attention.backend_parity import layer, random
from tests.gpu.device_tables import CPU, device_batch, make_pools
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.naive_sampler import Floats
from tests.stories import joined

FP8 = torch.float8_e4m3fn
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
STEPS = {torch.bfloat16: 2**-6, FP8: 2**-3}  # of pools in another dtype
FEW_TOKENS, MANY_TOKENS = 5, FEW_ELEMENTS // 40 + 1
SLOTS = torch.tensor([9, 2, 30])
QUARTER = torch.tensor([[0.0, 1.0, 1.0, 0.0]]).repeat(3, 1)  # rotates two of four pairs, exactly
ROPES = {
    "none": None,
    "rotated": RopeInputs(QUARTER),
    "normed": RopeInputs(QUARTER, HeadNorms(torch.ones(6, 8), eps=1e-6)),
}
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 900, 60)]


def pools_of(dtype: torch.dtype, *, scales: tuple[float, float] = (1.0, 1.0)) -> KvPools:
    """Pools of one layer with 8 pages of 4 slots; rows 1 and 2 have the pages 1, 2 and 3, 4."""
    layers = (msgspec.structs.replace(layer(), kv_scales=scales),)
    pools = make_pools(layers, 8, table_shape=(3, 2), dtype=dtype)
    pools.page_tables[0][1:] = torch.tensor([[1, 2], [3, 4]])
    return pools


@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=KV_DTYPES)
@pytest.mark.parametrize("name", ["torch-ref", "paged-sdpa"])
def test_attention_sees_what_was_stored_rounded_to_its_dtype(name: str, dtype: torch.dtype) -> None:
    """The output equals that with KV in the dtype of q which holds the same rounded numbers."""
    narrow, wide = pools_of(dtype, scales=(0.5, 4.0)), pools_of(torch.float64)
    batch = device_batch([5, 3], [2, 0])
    k_scale, v_scale = narrow.layers[0].scales
    outputs = []
    for pools in (narrow, wide):
        site = AttentionSite(pools, group_layers((layer(),)), torch.float64, CpuDevice())
        backend = BACKENDS[name]().build(site)
        made = ForwardBatch.init_new(batch, pools)
        generator = torch.Generator().manual_seed(3)
        q, k, v = random(generator, 8, 8, 8).split((4, 2, 2), dim=1)
        if pools is wide:
            k = from_kv_dtype(to_kv_dtype(k, dtype, k_scale), k.dtype, k_scale)
            v = from_kv_dtype(to_kv_dtype(v, dtype, v_scale), v.dtype, v_scale)
        heads = torch.cat((q, k, v), dim=1)
        outputs.append(backend.bind(made, backend.plan(made))(layer(), AttentionInputs(heads)))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    assert narrow.layers[0].keys.dtype == dtype


def test_fp8_is_scaled_and_clamped_and_other_dtypes_are_only_rounded() -> None:
    given = torch.tensor([0.0, 3.0, 900.0, -900.0, 1e6])
    stored = to_kv_dtype(given, FP8, 2.0)
    assert from_kv_dtype(stored, torch.float32, 2.0).tolist() == [0.0, 3.0, 896.0, -896.0, 896.0]
    assert to_kv_dtype(given, torch.float32, 1.0) is given
    assert pools_of(torch.float32, scales=(0.5, 4.0)).layers[0].scales == (1.0, 1.0)


def test_the_options_choices_are_what_can_be_stored() -> None:
    option = next(item for item in options_of(KvOptions) if item.name == "kv_cache_dtype")
    assert option.limits.choices == ("auto", *KV_DTYPES)
    assert kv_dtype_of("auto", torch.float64) == torch.float64
    assert [kv_dtype_name(kv_dtype_of(name, torch.float64)) for name in KV_DTYPES] == [*KV_DTYPES]


def test_the_same_memory_has_twice_as_many_pages_in_half_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aserve.gpu.device.cpu.device.MAX_KV_BYTES", 4 << 20)
    whole, half = (tiny(kv_dtype=name, max_rows=64, num_pages=None) for name in ("bfloat16", "fp8"))
    pages = [executor.spec.groups[0].num_pages for executor in (whole, half)]
    assert pages[1] == pytest.approx(2 * pages[0], rel=0.02)
    pools = [executor._runner.state.pools for executor in (whole, half)]
    sizes = [each.size_bytes - each.token_pool.nbytes for each in pools]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("bfloat16", 0.05), ("fp8", 0.5)])
def test_the_bundled_models_logprobs_stay_close(kv_dtype: str, tolerance: float) -> None:
    """Compares the natural log-probabilities of all tokens of a chunked prompt."""
    exact, rounded = (
        scored(tiny(kv_dtype=name, max_batched_tokens=16)) for name in ("auto", kv_dtype)
    )
    difference = np.abs(rounded - exact)
    assert 0 < difference.max() < tolerance
    assert difference.mean() < tolerance / 5


def test_an_engine_serves_from_eight_bits_as_each_request_alone() -> None:
    """Prefix caching, chunks and retraction work on bytes of any dtype."""
    model = HashModel(window=6)
    asked = [
        request(f"r{i}", [i + j % 30 for j in range(num)]) for i, num in enumerate((30, 9, 25))
    ]
    alone: dict[tuple[str, int], list[int]] = {}
    for one in asked:
        alone |= serve(make_executor(model, kv_dtype="fp8"), [one]).outputs
    small = make_executor(model, kv_dtype="fp8", max_batched_tokens=16, num_pages=20)
    assert serve(small, asked, chaos=1).outputs == alone
    assert serve(make_executor(model), asked).outputs != alone


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("pool_dtype", [None, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("num_tokens", [0, FEW_TOKENS, MANY_TOKENS])
@pytest.mark.parametrize(("rotary_dim", "is_normed"), [(0, False), (4, False), (8, True)])
def test_the_device_stores_what_torch_stores(
    rotary_dim: int,
    num_tokens: int,
    pool_dtype: torch.dtype | None,
    dtype: torch.dtype,
    *,
    is_normed: bool,
) -> None:
    generator = torch.Generator().manual_seed(2)
    heads = torch.randn((num_tokens, 5, 8), generator=generator).to(dtype)
    norms = HeadNorms(torch.randn((4, 8), generator=generator), eps=1e-5)
    rope = None
    if rotary_dim:
        rotary = Rotary(DefaultRope(100.0), rotary_dim, max_model_len=64, dtype=dtype, device=CPU)
        rope = RopeInputs(rotary.at(torch.arange(num_tokens) % 64), norms if is_normed else None)
    slots = torch.arange(num_tokens).flip(0)
    scales = (2.0, 0.5) if pool_dtype == FP8 else (1.0, 1.0)
    stores = CpuDevice().ops(dtype, is_deterministic=False).rope_and_store_kv, rope_then_store_kv
    pools = torch.zeros((2, 2, num_tokens, 1, 8), dtype=pool_dtype or dtype)
    got, expected = (
        store(heads, rope, slots, (keys, values), scales)
        for store, (keys, values) in zip(stores, pools, strict=True)
    )
    assert got.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    step = max(tolerance, STEPS.get(pool_dtype or dtype, 0.0))
    torch.testing.assert_close(pools[0].float(), pools[1].float(), rtol=step, atol=step)


@pytest.mark.parametrize("dtype", [FP8, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", [None, ROPES["rotated"]], ids=["none", "rotated"])
def test_the_kernel_stores_what_torch_stores(rope: RopeInputs | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    heads = torch.randint(-15, 16, (3, 8, 8), generator=generator).float()  # exact in all
    heads = heads.transpose(1, 2).contiguous().transpose(1, 2)  # they lie apart
    plain, kernel = (pools_of(dtype, scales=(0.5, 4.0)).layers[0] for _ in range(2))
    queries = plain.rope_and_store_kv(layer(), AttentionInputs(heads, rope), SLOTS)
    kernel = dataclasses.replace(kernel, store=triton_store(torch.float32))
    assert torch.equal(
        kernel.rope_and_store_kv(layer(), AttentionInputs(heads, rope), SLOTS), queries
    )
    assert torch.equal(kernel.keys.float(), plain.keys.float())
    assert torch.equal(kernel.values.float(), plain.values.float())


class Calls(TorchDispatchMode):
    """Records the names of the torch operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_a_layer_ropes_and_stores_in_one_launch_and_nothing_else(
    rope: RopeInputs | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = MagicMock()
    monkeypatch.setattr(rope_and_store_kv, "_rope_and_store", kernel)
    kv = dataclasses.replace(pools_of(torch.bfloat16).layers[0], store=triton_store(torch.bfloat16))
    heads = torch.zeros((3, 8, 8), dtype=torch.bfloat16)
    with Calls() as calls:
        kv.rope_and_store_kv(layer(), AttentionInputs(heads, rope), SLOTS)
    assert kernel.__getitem__.return_value.call_count == 1
    assert set(calls.names) <= {"new_empty", "empty"}


def tiny(**options: Any) -> TorchExecutor:
    """The bundled model in float32."""
    fixed = {"dtype": "float32", "attention": "paged-sdpa", "max_rows": 4, "num_pages": 65}
    settings = {**fixed, **options}
    return build_on(CpuDevice(), BuildOptions(MODEL_DIR, **settings))


def scored(executor: TorchExecutor) -> Floats:
    asked = request("scored", PROMPT, prompt_logprobs=0, max_tokens=0)
    runs = serve(executor, [asked]).scores["scored", 0]
    return np.asarray(array_f32(joined(runs).chosen), np.float64)


PAGE_SIZE = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("windows", [(None, None), (8, None), (8, 8)])
def test_a_cleared_page_is_empty_in_every_layer_of_its_group_and_nowhere_else(
    windows: tuple[int | None, ...], dtype: torch.dtype
) -> None:
    layers = tuple(
        LayerSpec(index, num_heads=2, num_kv_heads=1, head_dim=2, scale=1.0, window=window)
        for index, window in enumerate(windows)
    )
    pools = make_pools(layers, 5, table_shape=(2, 3), page_size=PAGE_SIZE, dtype=dtype)
    for kv in pools.layers.values():
        kv.keys.fill_(torch.nan)
        kv.values.fill_(torch.nan)
    for number in range(len(pools.page_tables)):
        pools.clear(number, torch.tensor([1, 3]))
    for kv in pools.layers.values():
        for pool in (kv.keys, kv.values):
            empty = (pool.float() == 0).all(dim=(1, 2)).view(-1, PAGE_SIZE)
            assert empty.all(dim=1).tolist() == [False, True, False, True, False]
            assert empty.any(dim=1).tolist() == [False, True, False, True, False]
