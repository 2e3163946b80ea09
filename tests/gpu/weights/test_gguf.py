"""Blocks of GGUF as codes, and widened, against the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from aserve.gguf.families import RowOrder
from aserve.gguf.table import TABLE, GgufTable, GgufTensor
from aserve.gpu.device.cpu.isa import read_isa
from aserve.gpu.device.cpu.kernel_linear import QuantLinear
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.weights.format import WeightRequest
from aserve.gpu.weights.gguf import GgufFile, GgufSlice
from aserve.gpu.weights.int4 import CodedWeight
from aserve.gpu.weights.mxfp4 import Mxfp4Weight
from aserve.gpu.weights.quantized import QuantizedLinear, joined

OUT, IN = 12, 512
CPU = torch.device("cpu")
EVERY = (slice(0, OUT), slice(0, IN))
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
OTHERS = ("Q8_0", "Q5_0", "Q5_1", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS")


def stored(kind: str, **changes: Any) -> tuple[GgufSlice, torch.Tensor]:
    """Returns a tensor of random blocks whose factors are numbers, and what it stands for in the
    file's order."""
    number = GGMLQuantizationType[kind]
    num_weights, num_bytes = GGML_QUANT_SIZES[number]
    data = np.random.default_rng(3).integers(0, 256, (OUT, IN // num_weights, num_bytes), np.uint8)
    if kind == "MXFP4":  # exponents
        data[:, :, 0] = np.random.default_rng(4).integers(120, 130, data.shape[:2])
    for place in factors_of(kind, num_bytes):
        factors = np.random.default_rng(place).uniform(0.01, 0.1, data.shape[:2])
        data[:, :, place : place + 2] = factors.astype(np.float16)[..., None].view(np.uint8)
    blocks = data.reshape(OUT, -1)
    wide = torch.from_numpy(gguf.dequantize(blocks, number)).reshape(OUT, IN)
    file = np.concatenate([np.zeros(7, np.uint8), blocks.ravel()])
    tensor = GgufTensor(0, int(number), (OUT, IN), 7, blocks.size, **changes)
    return GgufSlice(tensor, file, CPU), wide


def factors_of(kind: str, num_bytes: int) -> tuple[int, ...]:
    """Returns where a block has its float16 numbers."""
    match kind:
        case "MXFP4":
            return ()
        case "Q6_K" | "Q3_K":
            return (num_bytes - 2,)
        case "Q2_K":
            return (num_bytes - 4, num_bytes - 2)
        case "Q4_1" | "Q5_1" | "Q4_K" | "Q5_K":
            return (0, 2)
        case _:
            return (0,)


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_blocks_of_4_bits_are_the_same_weights_as_codes(kind: str) -> None:
    tensor, wide = stored(kind)
    coded = tensor.coded(EVERY)
    assert isinstance(coded, CodedWeight)
    assert (coded.bits, coded.group) == (4, 32)
    assert coded.codes.aminmax() == (torch.tensor(-8), torch.tensor(7))
    torch.testing.assert_close(coded.widened(), wide, atol=1e-5, rtol=1e-6)


def test_blocks_without_offsets_have_none() -> None:
    """Their zeros would be read in each step."""
    for kind, has_offsets in (("Q4_0", False), ("Q4_1", True), ("Q4_K", True)):
        coded = stored(kind)[0].coded(EVERY)
        assert isinstance(coded, CodedWeight)
        assert bool(coded.offsets.numel()) is has_offsets


def test_blocks_of_mxfp4_are_the_same_weights_as_elements() -> None:
    tensor, wide = stored("MXFP4")
    coded = tensor.coded((slice(2, 9), slice(64, 512)))
    assert isinstance(coded, Mxfp4Weight)
    assert torch.equal(coded.widened(), wide[2:9, 64:])
    assert tensor.coded((slice(0, OUT), slice(0, 40))) is None
    assert torch.equal(tensor[3:5, 64:96], wide[3:5, 64:96])


@pytest.mark.parametrize("kind", OTHERS)
def test_other_blocks_become_codes_of_8_bits(kind: str) -> None:
    tensor, wide = stored(kind)
    coded = tensor.coded(EVERY)
    assert isinstance(coded, CodedWeight)
    assert (coded.bits, coded.scales.shape) == (8, (OUT, 1))
    largest = wide.abs().amax(dim=1, keepdim=True)
    assert ((coded.widened() - wide).abs() <= largest / 127 / 2 * 1.0001).all()


@pytest.mark.parametrize("kind", [*FOUR_BITS, *OTHERS])
def test_blocks_are_widened_whole_and_in_parts(kind: str) -> None:
    tensor, wide = stored(kind)
    assert torch.equal(tensor[()], wide)
    assert torch.equal(tensor[3:5, 64:96], wide[3:5, 64:96])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_a_part_of_the_codes_is_that_part(kind: str) -> None:
    tensor, wide = stored(kind)
    coded = tensor.coded((slice(4, 9), slice(32, 320)))
    assert isinstance(coded, CodedWeight)
    largest = wide[4:9, 32:320].abs().max().item()
    torch.testing.assert_close(coded.widened(), wide[4:9, 32:320], atol=largest / 127, rtol=0.0)


def test_a_part_that_cuts_a_group_is_none_of_codes() -> None:
    tensor, _ = stored("Q4_0")
    assert tensor.coded((slice(0, OUT), slice(0, 40))) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_rows_of_heads_are_put_into_the_models_order(kind: str) -> None:
    tensor, wide = stored(kind, order=RowOrder(2, 3, 2, 1))
    order = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(tensor[()], wide[order])
    assert torch.equal(tensor[2:4, 0:IN], wide[order[2:4]])
    coded = tensor.coded((slice(2, 4), slice(0, IN)))
    assert isinstance(coded, CodedWeight)
    largest = wide.abs().max().item()
    torch.testing.assert_close(coded.widened(), wide[order[2:4]], atol=largest / 127, rtol=0.0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_columns_of_heads_are_put_into_the_models_order(kind: str) -> None:
    tensor, wide = stored(kind, order=RowOrder(1, 2, 4, 64), has_columns=True)
    heads = wide.view(OUT, 2, 4, 64).swapaxes(1, 2).flatten(1)
    assert torch.equal(tensor[()], heads)
    assert torch.equal(tensor[2:4, 32:96], heads[2:4, 32:96])
    coded = tensor.coded((slice(2, 4), slice(32, 480)))
    assert isinstance(coded, CodedWeight)
    largest = wide.abs().max().item()
    torch.testing.assert_close(coded.widened(), heads[2:4, 32:480], atol=largest / 127, rtol=0.0)


def test_columns_whose_order_cuts_a_group_have_no_codes() -> None:
    tensor, _ = stored("Q4_0", order=RowOrder(1, 4, 8, 16), has_columns=True)
    assert tensor.coded(EVERY) is None


def test_decays_are_logarithms() -> None:
    values = -torch.tensor([0.5, 2.0]).exp()
    tensor = GgufTensor(0, 0, (2,), 0, 8, is_decay=True)
    read = GgufSlice(tensor, values.numpy().view(np.uint8), CPU)[()]
    torch.testing.assert_close(read, torch.tensor([0.5, 2.0]))


def test_weights_of_4_and_8_bits_are_joined_in_8() -> None:
    four, eight = stored("Q4_K"), stored("Q6_K")
    parts = [part for part in (four[0].coded(EVERY), eight[0].coded(EVERY)) if part is not None]
    whole = joined(parts)
    assert isinstance(whole, CodedWeight)
    assert whole.bits == 8
    wide = torch.cat([four[1], eight[1]])
    largest = wide.abs().amax(dim=1, keepdim=True)
    assert ((whole.widened() - wide).abs() <= largest / 127).all()


@pytest.mark.parametrize(
    ("kinds", "bits"), [(("Q4_0", "Q4_0"), 4), (("Q4_1", "Q4_0"), 4), (("Q8_0", "Q5_0"), 8)]
)
def test_weights_of_the_same_bits_keep_them(kinds: tuple[str, str], bits: int) -> None:
    parts = [stored(kind)[0].coded(EVERY) for kind in kinds]
    whole = joined([part for part in parts if part is not None])
    assert isinstance(whole, CodedWeight)
    assert whole.bits == bits


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_the_cpu_multiplies_blocks_as_codes(kind: str) -> None:
    request = WeightRequest("bfloat16", "bfloat16", 1 << 30, stored_quantization="int4")
    form = choose_cpu_format(request, read_isa())
    tensor, wide = stored(kind)
    coded = tensor.coded(EVERY)
    assert isinstance(coded, CodedWeight)
    layer = form.prepare(QuantizedLinear(coded, None), CPU, dtype=form.dtype)
    assert isinstance(layer, QuantLinear)
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(5), dtype=form.dtype)
    expected = x.float() @ wide.T
    error = (layer(x).float() - expected).norm() / expected.norm()
    assert error < 0.03


@pytest.mark.parametrize(("quantization", "bits"), [(None, 8), ("int4", 4)])
def test_what_is_asked_for_is_rounded_again(quantization: str | None, bits: int) -> None:
    request = WeightRequest(
        *("bfloat16", "bfloat16", 1 << 30), stored_quantization="int4", quantization=quantization
    )
    form = choose_cpu_format(request, read_isa())
    coded = stored("Q8_0")[0].coded(EVERY)
    assert isinstance(coded, CodedWeight)
    layer = form.prepare(QuantizedLinear(coded, None), CPU, dtype=form.dtype)
    assert isinstance(layer, QuantLinear)
    assert layer.weight.kind.bits == bits


def test_a_file_has_the_tensors_of_its_number(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    first, second = GgufTensor(0, 0, (2, 3), 0, 24), GgufTensor(1, 0, (6,), 0, 24, offset=-1.0)
    table = GgufTable(2, {"a.weight": first, "b.weight": second})
    (tmp_path / TABLE).write_bytes(msgspec.json.encode(table))
    for name in ("model.gguf", "model-1.gguf"):
        (tmp_path / name).write_bytes(values.tobytes())
    with GgufFile(tmp_path / "model.gguf", CPU) as file:
        assert file.keys() == ["a.weight"]
        assert file.get_tensor("a.weight").tolist() == [[0, 1, 2], [3, 4, 5]]
    with GgufFile(tmp_path / "model-1.gguf", CPU) as file:
        assert file.keys() == ["b.weight"]
        assert file.get_slice("b.weight")[(slice(2, 4),)].tolist() == [1.0, 2.0]
