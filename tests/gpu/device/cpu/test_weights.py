"""Which form of weights a processor gets, and that each of them gives the right products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.device.cpu.kernel_linear import prepare_int8, prepare_tiled
from aserve.gpu.device.cpu.linear import PerToken, prepare_fp16_stored, prepare_packed
from aserve.gpu.device.cpu.weights import (
    SMALL_BYTES,
    SMALL_MIXED_PREFILL_TOKENS,
    TINY_BYTES,
    CpuIsa,
    choose_cpu_format,
    read_isa,
)
from aserve.gpu.layers.linear import Linear, Prepare, prepare
from aserve.gpu.weights.format import WeightFormat, WeightRequest

CPU = torch.device("cpu")
LARGE = SMALL_BYTES  # weights, of four bytes each
AMX = CpuIsa(bf16_products="AMX", has_onednn=True, has_fbgemm=True, has_numba=True, has_avx512=True)
AVX2 = replace(AMX, bf16_products=None, has_avx512=False)
OTHER = replace(AVX2, has_fbgemm=False)
BARE = replace(OTHER, has_onednn=False, has_numba=False)
HERE = read_isa()


@pytest.mark.parametrize(
    ("isa", "dtype", "format_", "weight_bits"),
    [
        (AMX, torch.bfloat16, prepare_packed, 16),
        (AVX2, torch.float32, prepare_fp16_stored, 16),
        (OTHER, torch.float32, prepare_packed, 32),
        (BARE, torch.float32, prepare, 32),
    ],
)
def test_auto_takes_the_fewest_bytes_that_the_machine_multiplies_fast(
    isa: CpuIsa, dtype: torch.dtype, format_: Prepare, weight_bits: int
) -> None:
    chosen = choose_cpu_format(WeightRequest("auto", "bfloat16", LARGE), isa)
    assert (chosen.dtype, chosen.prepare) == (dtype, format_)
    assert chosen.weight_bits == weight_bits
    assert "auto: " in chosen.about


def test_a_tiny_model_answers_alike_on_every_machine() -> None:
    request = WeightRequest("auto", "bfloat16", TINY_BYTES // 4)
    assert {choose_cpu_format(request, isa).dtype for isa in (AMX, AVX2, OTHER, BARE)} == {
        torch.float32
    }


def test_a_small_model_is_in_bfloat16_where_that_is_multiplied_fast() -> None:
    for num_weights in (TINY_BYTES // 4 + 1, SMALL_BYTES // 4):
        request = WeightRequest("auto", "bfloat16", num_weights)
        assert choose_cpu_format(request, AMX).dtype == torch.bfloat16
        assert {choose_cpu_format(request, isa).dtype for isa in (AVX2, OTHER, BARE)} == {
            torch.float32
        }
        assert choose_cpu_format(request, AVX2).prepare is prepare_packed


@pytest.mark.parametrize("name", ["auto", "bfloat16"])
def test_a_small_model_computes_in_one_thread_a_large_one_in_all(name: str) -> None:
    small = choose_cpu_format(WeightRequest(name, "bfloat16", SMALL_BYTES // 4), AMX)
    large = choose_cpu_format(WeightRequest(name, "bfloat16", SMALL_BYTES // 4 + 1), AMX)
    assert (small.max_threads, large.max_threads) == (1, None)
    assert (small.max_mixed_prefill_tokens, large.max_mixed_prefill_tokens) == (
        SMALL_MIXED_PREFILL_TOKENS,
        None,
    )


def test_a_small_model_has_products_of_its_own_where_vectors_are_wide() -> None:
    def format_(name: str, isa: CpuIsa) -> WeightFormat:
        return choose_cpu_format(WeightRequest(name, None, SMALL_BYTES // 4), isa)

    no_bf16 = replace(AMX, bf16_products=None)
    ours = [format_("auto", AMX), format_("bfloat16", AMX), format_("auto", no_bf16)]
    others = [format_("auto", AVX2), format_("bfloat16", no_bf16), format_("float64", AMX)]
    assert {chosen.prepare for chosen in ours} == {prepare_tiled}
    assert prepare_tiled not in {chosen.prepare for chosen in others}


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_our_own_equal_the_plain_product(
    dtype: torch.dtype, has_bias: bool, num_tokens: int
) -> None:
    _assert_near(prepare_tiled, dtype, has_bias=has_bias, num_tokens=num_tokens)


@pytest.mark.parametrize("isa", [AMX, AVX2, OTHER, BARE])
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_a_dtype_that_is_named_is_honoured_exactly(name: str, isa: CpuIsa) -> None:
    chosen = choose_cpu_format(WeightRequest(name, "bfloat16", LARGE), isa)
    assert (chosen.dtype, chosen.about) == (getattr(torch, name), name)
    assert chosen.prepare is not prepare_fp16_stored


@pytest.mark.parametrize("isa", [AVX2, OTHER, BARE])
def test_nothing_is_packed_for_products_that_the_machine_lacks(isa: CpuIsa) -> None:
    assert choose_cpu_format(WeightRequest("bfloat16", None, LARGE), isa).prepare is prepare


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype is 'int4'; expected auto or one of float32"):
        choose_cpu_format(WeightRequest("int4", None, LARGE), BARE)


@pytest.mark.parametrize(
    ("isa", "dtype"), [(AMX, torch.bfloat16), (AVX2, torch.float32), (OTHER, torch.float32)]
)
def test_weights_of_a_byte_keep_the_dtype_of_the_machine(isa: CpuIsa, dtype: torch.dtype) -> None:
    chosen = choose_cpu_format(WeightRequest("auto", None, LARGE, "int8"), isa)
    assert (chosen.dtype, chosen.prepare, chosen.weight_bits) == (dtype, prepare_int8, 8)


def test_weights_of_a_byte_are_refused_where_nothing_multiplies_them() -> None:
    with pytest.raises(ConfigError, match="float32 or bfloat16 on the CPU, not in float64"):
        choose_cpu_format(WeightRequest("float64", None, LARGE, "int8"), AMX)
    with pytest.raises(ConfigError, match="needs numba"):
        choose_cpu_format(WeightRequest("auto", None, LARGE, "int8"), BARE)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_byte_equal_the_plain_product_where_they_are_exact(
    dtype: torch.dtype, has_bias: bool, num_tokens: int
) -> None:
    _assert_near(prepare_int8, dtype, has_bias=has_bias, num_tokens=num_tokens)


def test_a_weight_of_a_byte_is_off_by_half_a_step_at_most() -> None:
    """A step is the 127th part of its output's largest weight; an output of zeros stays one."""
    weight = torch.randn((5000, 16), generator=torch.Generator().manual_seed(3))
    weight[7] = 0
    rounded = prepare_int8(Linear(weight), CPU, dtype=torch.float32)(torch.eye(16)).t()
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16", "auto"])
def test_the_forms_of_this_machine_equal_the_plain_product(
    name: str, has_bias: bool, num_tokens: int
) -> None:
    chosen = choose_cpu_format(WeightRequest(name, None, LARGE), HERE)
    _assert_near(chosen.prepare, chosen.dtype, has_bias=has_bias, num_tokens=num_tokens)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_stored_as_float16_equal_the_plain_product(has_bias: bool, num_tokens: int) -> None:
    """On every machine, also on those that choose another form."""
    _assert_near(prepare_fp16_stored, torch.float32, has_bias=has_bias, num_tokens=num_tokens)


def _assert_near(format_: Prepare, dtype: torch.dtype, *, has_bias: bool, num_tokens: int) -> None:
    """On weights that all forms hold exactly; the tolerance is that of the sums."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-63, 64, (50, 24), generator=generator) / 64
    weight[:, 0] = 127 / 64
    bias = torch.randint(-64, 64, (50,), generator=generator) / 64 if has_bias else None
    wide = torch.randn((num_tokens, 48), generator=generator).to(dtype)
    x = wide[:, :24]  # rows of another stride, as views of a joined product have them
    got = format_(Linear(weight, bias), CPU, dtype=dtype)(x)
    expected = prepare(Linear(weight.double(), bias), CPU, dtype=torch.float64)(x.double())
    assert (got.dtype, got.shape) == (dtype, (num_tokens, 50))
    assert (got.double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_deterministic_products_are_of_one_token_in_whatever_form() -> None:
    weight = torch.eye(4)
    for quantization in (None, "int8"):
        request = WeightRequest("auto", "bfloat16", LARGE, quantization, is_deterministic=True)
        format_ = choose_cpu_format(request, AMX)
        op = format_.prepare(Linear(weight), torch.device("cpu"), dtype=torch.float32)
        assert isinstance(op, PerToken)
        assert format_.about.endswith(", each token alone")
