"""KV that is stored in another dtype than the model's: rounding, memory, and served tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from aserve.config import KvOptions
from aserve.errors import ConfigError
from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.build import BuildOptions, build_on
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.layer_groups import AttentionInputs, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import KV_DTYPES, from_kv_dtype, kv_dtype_name, kv_dtype_of, to_kv_dtype
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import array_f32
from aserve.messages.executor import GroupSpec
from aserve.option import options_of
from aserve.tiny import MODEL_DIR
from tests.fakes.hash_model import HashModel
from tests.gpu.attention.backend_parity import layer, random
from tests.gpu.device_tables import CPU, device_batch
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.naive_sampler import Floats
from tests.stories import joined

FP8 = torch.float8_e4m3fn
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 900, 60)]


def pools_of(dtype: torch.dtype, *, scales: tuple[float, float] = (1.0, 1.0)) -> KvPools:
    """Pools of one layer with 8 pages of 4 slots; rows 1 and 2 have the pages 1, 2 and 3, 4."""
    layers = (msgspec.structs.replace(layer(), kv_scales=scales),)
    pools = KvPools(
        group_layers(layers),
        (GroupSpec("full", 8),),
        page_size=4,
        table_shape=(3, 2),
        dtype=dtype,
        device=CPU,
    )
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


def test_pages_in_fp8_are_cleared() -> None:
    pools = pools_of(FP8)
    pools.layers[0].keys.fill_(torch.nan)
    pools.clear(0, torch.tensor([1, 3]))
    empty = (pools.layers[0].keys.float() == 0).all(dim=(1, 2)).view(-1, 4).all(dim=1)
    assert empty.nonzero().flatten().tolist() == [1, 3]


def test_the_options_choices_are_what_can_be_stored() -> None:
    option = next(item for item in options_of(KvOptions) if item.name == "kv_cache_dtype")
    assert option.limits.choices == ("auto", *KV_DTYPES)
    assert kv_dtype_of("auto", torch.float64) == torch.float64
    assert [kv_dtype_name(kv_dtype_of(name, torch.float64)) for name in KV_DTYPES] == [*KV_DTYPES]


def test_kv_in_eight_bits_takes_a_quarter_of_float32s_bytes() -> None:
    executors = {name: tiny(kv_dtype=name, num_pages=33) for name in ("auto", "bfloat16", "fp8")}
    bytes_of = {name: kv_bytes(executor) for name, executor in executors.items()}
    assert bytes_of["auto"] == 2 * bytes_of["bfloat16"] == 4 * bytes_of["fp8"]
    assert "KV fp8 " in executors["fp8"].about
    assert "KV float32 " in executors["auto"].about


def test_the_same_memory_has_twice_as_many_pages_in_half_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aserve.gpu.device.cpu.device.MAX_KV_BYTES", 4 << 20)
    whole, half = (tiny(kv_dtype=name, max_rows=64, num_pages=None) for name in ("bfloat16", "fp8"))
    pages = [executor.spec.groups[0].num_pages for executor in (whole, half)]
    assert pages[1] == pytest.approx(2 * pages[0], rel=0.02)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("bfloat16", 0.05), ("fp8", 0.5)])
def test_the_bundled_models_logprobs_stay_close(kv_dtype: str, tolerance: float) -> None:
    """Compares the natural log-probabilities of all tokens of a chunked prompt."""
    exact, rounded = (
        scored(tiny(kv_dtype=name, max_batched_tokens=16)) for name in ("auto", kv_dtype)
    )
    difference = np.abs(rounded - exact)
    assert 0 < difference.max() < tolerance
    assert difference.mean() < tolerance / 5


def test_a_backend_that_cannot_read_it_is_refused_with_what_it_has() -> None:
    with pytest.raises(ConfigError, match=r"paged-cpu does not support KV of fp8 \(has float32\)"):
        tiny(kv_dtype="fp8", attention="paged-cpu")


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


def tiny(**options: Any) -> TorchExecutor:
    """The bundled model in float32."""
    fixed = {"dtype": "float32", "attention": "paged-sdpa", "max_rows": 4, "num_pages": 65}
    settings = {**fixed, **options}
    return build_on(CpuDevice(), BuildOptions(MODEL_DIR, **settings))


def kv_bytes(executor: TorchExecutor) -> int:
    pools = executor._runner.state.pools
    return pools.size_bytes - pools.token_pool.nbytes


def scored(executor: TorchExecutor) -> Floats:
    asked = request("scored", PROMPT, prompt_logprobs=0, max_tokens=0)
    runs = serve(executor, [asked]).scores["scored", 0]
    return np.asarray(array_f32(joined(runs).chosen), np.float64)
