"""Quantized linear layers of CUDA in Triton's interpreter: each published format, and rounding
while a model is loaded, against the widened weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.cuda.quantized import (
    BITS,
    FACTOR_BITS,
    Fp8Linear,
    PrepareQuantized,
    WeightOnlyLinear,
    matrix_of,
)
from aserve.gpu.layers.linear import Linear, LinearOp, prepare
from aserve.gpu.weights.format import WeightFormat, WeightRequest
from aserve.gpu.weights.fp8 import Fp8Weight
from aserve.gpu.weights.quantized import QuantizedLinear
from aserve.gpu.weights.source import Target
from aserve_kernels.fp8_linear import GROUP, fp8_linear_ref, quantize_rows_ref
from aserve_kernels.weight_only_linear import FEW_TOKENS, CodedMatrix, weight_only_linear_ref
from tests.fakes.cuda import FakeCuda
from tests.gpu.weights.checkpoints import write_checkpoint
from tests.gpu.weights.published import FORMATS, SIZES, quantized
from tests.kernels.conftest import _exact_rounding, sums_in_one_order  # noqa: F401
from tests.kernels.tolerance import draw
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of

CPU = torch.device("cpu")
MANY = FEW_TOKENS + 4
BASE = WeightRequest("float32", None, 1)


def format_of(request: WeightRequest, *, has_fp8: bool = True) -> WeightFormat:
    cuda = FakeCuda()
    cuda.has_fp8 = has_fp8
    return CudaDevice(cuda).weight_format(request)


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_multiplied_as_its_checkpoint_has_it(name: str, tmp_path: Path) -> None:
    """On a device without products of fp8, whose activations are never rounded."""
    form, (stored, meant) = FORMATS[name], quantized(FORMATS[name])
    own = write_checkpoint(tmp_path / "own", stored, quantization_config=form.config, **SIZES)
    expected = load_model(write_checkpoint(tmp_path / "wide", meant, **SIZES))
    made: list[LinearOp] = []
    chosen = format_of(replace(BASE, stored_quantization=form.device_name), has_fp8=False)

    def noted(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        made.append(chosen.prepare(linear, device, dtype=dtype))
        return made[-1]

    model = load_model(own, target=Target(prepare=noted))
    tokens = torch.arange(3)
    torch.testing.assert_close(
        logits_of(model, tokens), logits_of(expected, tokens), rtol=1e-4, atol=1e-4
    )
    num_kept = sum(isinstance(layer, WeightOnlyLinear) for layer in made)
    assert (num_kept, len(made)) == (4, 5)  # all but the head
    assert chosen.factor_bits == FACTOR_BITS


def fp8_layer(block: tuple[int, int], *, has_input_scale: bool = False) -> QuantizedLinear:
    sides = zip((256, 384), block, strict=True)
    scales = torch.rand([-(-size // own) for size, own in sides]) / 16
    input_scale = torch.tensor([0.01]) if has_input_scale else None
    elements = draw(256, 384, seed=1).to(torch.float8_e4m3fn)
    return QuantizedLinear(Fp8Weight(elements, scales, block, input_scale), draw(256, seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("block", "group", "has_input_scale"),
    [((128, 128), GROUP, False), ((1, 384), 384, False), ((1, 384), 384, True)],
)
def test_activations_of_many_tokens_are_in_fp8(
    block: tuple[int, int], group: int, has_input_scale: bool, dtype: torch.dtype
) -> None:
    """In bfloat16, torch multiplies weights with a scale per row."""
    linear = fp8_layer(block, has_input_scale=has_input_scale)
    layer = PrepareQuantized(prepare, None, has_fp8=True, is_invariant=False)(
        linear, CPU, dtype=dtype
    )
    assert isinstance(layer, Fp8Linear)
    stored = linear.stored
    assert isinstance(stored, Fp8Weight)
    matrix, bias = matrix_of(stored), linear.bias
    assert bias is not None
    x = draw(MANY, 384, dtype=dtype)
    rows = quantize_rows_ref(x, group, stored.input_scale)
    expected = fp8_linear_ref(rows, matrix, bias.to(dtype), dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=tolerance)
    few = layer(x[:FEW_TOKENS])
    exact = weight_only_linear_ref(x[:FEW_TOKENS], matrix, bias.to(dtype))
    torch.testing.assert_close(few, exact, rtol=tolerance, atol=tolerance)
    assert not torch.equal(layer(x)[:FEW_TOKENS], few)  # they are rounded among many


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.05), ("int8", 0.01), ("int4", 0.12)])
@pytest.mark.parametrize("num_ins", [256, 100])
def test_a_layer_is_rounded_while_it_is_loaded(num_ins: int, name: str, most: float) -> None:
    """The error is that of the rounding, in relation to the product."""
    chosen = format_of(replace(BASE, quantization=name), has_fp8=False)
    linear = Linear(draw(70, num_ins, seed=1), draw(70, seed=2))
    x = draw(3, num_ins)
    got, expected = chosen.prepare(linear, CPU, dtype=torch.float32)(x), linear(x)
    error = (got - expected).norm() / expected.norm()
    assert 0 < error < most
    assert chosen.stored_bits == BITS[name]


def test_a_layer_in_another_format_is_rounded_to_the_one_that_is_asked_for() -> None:
    chosen = format_of(replace(BASE, quantization="int8", stored_quantization="fp8"))
    layer = chosen.prepare(fp8_layer((128, 128)), CPU, dtype=torch.float32)
    assert codes_of(layer).dtype == torch.int8
    chosen = format_of(replace(BASE, quantization="fp8", stored_quantization="fp8"))
    layer = chosen.prepare(fp8_layer((128, 128)), CPU, dtype=torch.float32)
    assert codes_of(layer).dtype == torch.float8_e4m3fn


def codes_of(layer: object) -> Tensor:
    assert isinstance(layer, WeightOnlyLinear | Fp8Linear)
    weight: CodedMatrix = layer._weight
    return weight.codes


def test_blocks_that_the_kernels_do_not_support_are_widened() -> None:
    linear = fp8_layer((100, 100))
    chosen = format_of(replace(BASE, stored_quantization="fp8"))
    layer = chosen.prepare(linear, CPU, dtype=torch.float32)
    x = draw(2, 384)
    assert isinstance(layer, Linear)
    torch.testing.assert_close(layer(x), linear(x))


@pytest.mark.usefixtures("sums_in_one_order")
def test_deterministic_layers_have_the_same_bits_for_any_number_of_tokens() -> None:
    request = replace(BASE, dtype="bfloat16", stored_quantization="fp8", is_deterministic=True)
    layer = format_of(request).prepare(fp8_layer((128, 128)), CPU, dtype=torch.bfloat16)
    x = draw(MANY, 384, dtype=torch.bfloat16)
    assert torch.equal(torch.cat([layer(x[:1]), layer(x[1:])]), layer(x))


def test_float64_has_no_quantized_layers() -> None:
    with pytest.raises(ConfigError, match="--quantization fp8 multiplies in float32, bfloat16 or"):
        format_of(replace(BASE, dtype="float64", quantization="fp8"))
    widened = format_of(replace(BASE, dtype="float64", stored_quantization="fp8"))
    assert widened.factor_bits is None
