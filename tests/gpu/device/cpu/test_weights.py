"""Which form of weights a processor gets, and that each of them gives the right products."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.device.cpu.isa import CpuIsa, read_isa
from aserve.gpu.device.cpu.kernel_linear import (
    PREPARE_QUANTIZED,
    QUANTIZATIONS,
    prepare_bf16_stored,
    prepare_tiled,
)
from aserve.gpu.device.cpu.linear import PerToken, prepare_fp16_stored, prepare_packed
from aserve.gpu.device.cpu.weights import (
    SMALL_BYTES,
    SMALL_MIXED_PREFILL_TOKENS,
    TINY_BYTES,
    choose_cpu_format,
)
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.layers.linear import Linear, Prepare, prepare
from aserve.gpu.weights.format import WeightRequest
from aserve_kernels.cpu.quant_codes import BYTE_DOTS

CPU = torch.device("cpu")
LARGE = SMALL_BYTES  # weights, of four bytes each
OF_FACTORS = 2.0**-11  # the most by which float16 is off, relative to the value
AMX = CpuIsa(
    bf16_products="AMX",
    has_onednn=True,
    has_fbgemm=True,
    has_numba=True,
    has_avx2=True,
    has_avx512=True,
)
NO_BF16 = replace(AMX, bf16_products=None)
AVX2 = replace(AMX, bf16_products=None, has_avx512=False)
OTHER = replace(AVX2, has_fbgemm=False, has_avx2=False)
AVX512 = replace(AMX, bf16_products="AVX512-bf16")
BARE = replace(OTHER, has_onednn=False, has_numba=False)


TINY, SMALL = TINY_BYTES // 4, SMALL_BYTES // 4  # weights: the most that count as such


@pytest.mark.parametrize(
    ("name", "num_weights", "isa", "dtype", "format_"),
    [
        # A large model gets the fewest bytes that the machine multiplies fast.
        ("auto", LARGE, AMX, torch.bfloat16, prepare_tiled),
        ("auto", LARGE, AVX2, torch.float32, prepare_bf16_stored),
        ("auto", LARGE, NO_BF16, torch.float32, prepare_bf16_stored),
        ("auto", LARGE, OTHER, torch.float32, prepare_packed),
        ("auto", LARGE, BARE, torch.float32, prepare),
        # aserve's own products read weights faster than oneDNN's.
        ("auto", LARGE, AVX512, torch.bfloat16, prepare_tiled),
        ("float32", LARGE, AVX512, torch.float32, prepare_packed),
        # A tiny model answers alike on every machine.
        ("auto", TINY, AMX, torch.float32, prepare_tiled),
        ("auto", TINY, AVX2, torch.float32, prepare_tiled),
        # A small model is in bfloat16 where that is multiplied fast.
        ("auto", TINY + 1, AMX, torch.bfloat16, prepare_tiled),
        ("auto", SMALL, AMX, torch.bfloat16, prepare_tiled),
        ("auto", TINY + 1, NO_BF16, torch.float32, prepare_bf16_stored),
        ("auto", SMALL, AVX2, torch.float32, prepare_bf16_stored),
        ("float32", SMALL, AVX2, torch.float32, prepare_tiled),
        ("auto", SMALL, BARE, torch.float32, prepare),
        # Nothing is packed for products that the machine lacks.
        ("bfloat16", SMALL, AMX, torch.bfloat16, prepare_tiled),
        ("bfloat16", TINY, AVX2, torch.bfloat16, prepare),
        # Where it has none of bfloat16, weights of it are widened as they are multiplied.
        ("bfloat16", LARGE, AVX2, torch.float32, prepare_bf16_stored),
        ("bfloat16", TINY + 1, NO_BF16, torch.float32, prepare_bf16_stored),
        ("bfloat16", LARGE, OTHER, torch.bfloat16, prepare),
        ("bfloat16", LARGE, BARE, torch.bfloat16, prepare),
    ],
)
def test_a_format_suits_the_machine_and_the_size_of_the_model(
    name: str, num_weights: int, isa: CpuIsa, dtype: torch.dtype, format_: Prepare
) -> None:
    chosen = choose_cpu_format(WeightRequest(name, "bfloat16", num_weights), isa)
    assert (chosen.dtype, chosen.prepare) == (dtype, format_)
    assert ("auto: " in chosen.about) == (name == "auto")


def test_a_checkpoint_of_float16_keeps_the_bits_that_bfloat16_has_not() -> None:
    chosen = choose_cpu_format(WeightRequest("auto", "float16", LARGE), AVX2)
    assert chosen.prepare is prepare_fp16_stored


@pytest.mark.parametrize("name", ["auto", "bfloat16"])
def test_a_small_model_computes_in_one_thread_a_large_one_in_all(name: str) -> None:
    small, large = (
        choose_cpu_format(WeightRequest(name, "bfloat16", num_weights), AMX)
        for num_weights in (SMALL, SMALL + 1)
    )
    assert (small.max_threads, large.max_threads) == (1, None)
    assert small.max_mixed_prefill_tokens == SMALL_MIXED_PREFILL_TOKENS
    assert large.max_mixed_prefill_tokens is None


@pytest.mark.parametrize(
    ("num_weights", "quantization", "num_threads"),
    [(TINY, None, 1), (TINY + 1, None, None), (SMALL, None, None), (SMALL, "int8", 1)],
)
def test_without_bfloat16_only_a_tiny_model_computes_in_one_thread(
    num_weights: int, quantization: str | None, num_threads: int | None
) -> None:
    request = WeightRequest("auto", "bfloat16", num_weights, quantization)
    chosen = choose_cpu_format(request, AVX2)
    assert chosen.max_threads == num_threads
    assert chosen.max_mixed_prefill_tokens == SMALL_MIXED_PREFILL_TOKENS


@pytest.mark.parametrize("isa", [AMX, AVX2, OTHER, BARE])
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_a_dtype_that_is_named_is_that_of_weights_and_kv(name: str, isa: CpuIsa) -> None:
    chosen = choose_cpu_format(WeightRequest(name, "float32", LARGE), isa)
    named = getattr(torch, name)
    assert chosen.weight_bits == 8 * named.itemsize
    assert (chosen.kv_dtype or chosen.dtype) == named
    assert chosen.prepare is not prepare_fp16_stored
    assert name in chosen.about


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype is 'int4'; expected auto or one of float32"):
        choose_cpu_format(WeightRequest("int4", None, LARGE), BARE)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize(
    ("isa", "dtype"), [(AMX, torch.bfloat16), (AVX2, torch.float32), (OTHER, torch.float32)]
)
def test_quantized_weights_keep_the_dtype_of_the_machine(
    isa: CpuIsa, dtype: torch.dtype, name: str, bits: int
) -> None:
    chosen = choose_cpu_format(WeightRequest("auto", None, LARGE, name), isa)
    assert (chosen.dtype, chosen.weight_bits) == (dtype, bits)
    assert chosen.prepare is PREPARE_QUANTIZED[name]


def test_quantized_weights_are_refused_where_nothing_multiplies_them() -> None:
    with pytest.raises(ConfigError, match="float32 or bfloat16 on the CPU, not in float64"):
        choose_cpu_format(WeightRequest("float64", None, LARGE, "int8"), AMX)
    with pytest.raises(ConfigError, match="needs numba"):
        choose_cpu_format(WeightRequest("auto", None, LARGE, "int8"), BARE)


def test_a_weight_of_a_byte_is_off_by_half_a_step_at_most() -> None:
    """A step is the 127th part of its output's largest weight; an output of zeros stays one."""
    weight = torch.randn((5000, 16), generator=torch.Generator().manual_seed(3))
    weight[7] = 0
    rounded = PREPARE_QUANTIZED["int8"](Linear(weight), CPU, dtype=torch.float32)(torch.eye(16)).t()
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= step * 0.5001 + rounded.abs() * OF_FACTORS).all()


@pytest.mark.parametrize("num_in", [256, 100])  # two groups, and one
def test_a_weight_of_half_a_byte_is_off_by_half_a_step_at_most(num_in: int) -> None:
    """A step is the 15th part of the range of its group. Equal weights are off by the rounding of
    their offset alone."""
    weight = torch.randn((5000, num_in), generator=torch.Generator().manual_seed(3))
    weight[7, :100] = 0.3
    layer = PREPARE_QUANTIZED["int4"](Linear(weight), CPU, dtype=torch.float32)
    rounded = layer(torch.eye(num_in)).t()
    low, high = weight.unflatten(1, (-1, min(num_in, 128))).aminmax(dim=2, keepdim=True)
    step = ((high - low) / 15).expand(-1, -1, min(num_in, 128)).flatten(1)
    # Those of the scale, times a code of 8 at most, and of the offset, which is near the weight.
    of_factors = (16 * step + rounded.abs()) * OF_FACTORS
    assert ((rounded - weight).abs() <= step * 0.5001 + of_factors).all()


def form_of_this_machine(name: str) -> tuple[Prepare, torch.dtype]:
    chosen = choose_cpu_format(WeightRequest(name, None, LARGE), read_isa())
    return chosen.prepare, chosen.dtype


FORMS = {
    "ours in float32": (prepare_tiled, torch.float32),
    "ours in bfloat16": (prepare_tiled, torch.bfloat16),
    **{
        f"{name} in {dtype}": (prepare, dtype)
        for name, prepare in PREPARE_QUANTIZED.items()
        for dtype in (torch.float32, torch.bfloat16)
    },
    "stored as float16": (prepare_fp16_stored, torch.float32),
    "stored as bfloat16": (prepare_bf16_stored, torch.float32),
    **{
        f"here for {name}": form_of_this_machine(name)
        for name in ("float32", "float64", "bfloat16", "float16", "auto")
    },
}


@pytest.mark.parametrize(
    ("num_tokens", "has_bias"), [(0, False), (1, True), (3, False), (40, True)]
)
@pytest.mark.parametrize(("format_", "dtype"), FORMS.values(), ids=FORMS)
def test_each_form_gives_the_plain_product(
    format_: Prepare, dtype: torch.dtype, has_bias: bool, num_tokens: int
) -> None:
    """On weights that all forms hold exactly; the tolerance is that of the sums."""
    generator = torch.Generator().manual_seed(0)
    weight = (16 * torch.randint(16, (50, 24), generator=generator) - 127) / 64
    weight[:, :2] = torch.tensor([-127, 113]) / 64
    bias = torch.randint(-64, 64, (50,), generator=generator) / 64 if has_bias else None
    wide = torch.randn((num_tokens, 48), generator=generator).to(dtype)
    x = wide[:, :24]  # rows of another stride, as views of a joined product have them
    got = format_(Linear(weight, bias), CPU, dtype=dtype)(x)
    expected = prepare(Linear(weight.double(), bias), CPU, dtype=torch.float64)(x.double())
    assert (got.dtype, got.shape) == (dtype, (num_tokens, 50))
    error = 4 * torch.finfo(dtype).eps
    for name, bits in QUANTIZATIONS.items():
        if format_ is PREPARE_QUANTIZED[name]:  # inputs become integers
            error = max(error, 2.0**-7 if BYTE_DOTS[bits] else 2.0**-15)
    assert (got.double() - expected).norm() <= error * expected.norm()


def test_deterministic_products_are_of_one_token_in_whatever_form() -> None:
    weight = torch.eye(4)
    for quantization in (None, "int8"):
        request = WeightRequest("auto", "bfloat16", LARGE, quantization, is_deterministic=True)
        format_ = choose_cpu_format(request, AMX)
        op = format_.prepare(Linear(weight), torch.device("cpu"), dtype=torch.float32)
        assert isinstance(op, PerToken)
        assert format_.about.endswith(", each token alone")


def test_kv_is_bfloat16_beside_weights_of_bfloat16_unless_it_is_named_or_has_latents() -> None:
    widened, plain = (
        choose_cpu_format(WeightRequest("auto", "bfloat16", LARGE), isa) for isa in (AVX2, AVX512)
    )
    layer = LayerSpec(index=0, num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
    latent = msgspec.structs.replace(layer, value_dim=4)
    assert widened.kv_dtype_for("auto", [layer]) == "bfloat16"
    assert widened.kv_dtype_for("float32", [layer]) == "float32"
    assert widened.kv_dtype_for("auto", [layer, latent]) == "auto"
    assert plain.kv_dtype_for("auto", [layer]) == "auto"
