"""Checkpoints in fp8 and other published formats, against the same weights in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.linear import Linear
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.fp8 import Fp8, Fp8Weight
from aserve.gpu.weights.inventory import Inventory
from aserve.gpu.weights.quantized import QuantizedLinear, StoredBits, joined
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.source import LinearBits, LoadProgress, Shard, Target
from tests.gpu.weights.checkpoints import llama_weights, write_checkpoint
from tests.gpu.weights.published import FORMATS, SIZES
from tests.gpu.weights.published import quantized as published
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of

BLOCK = (5, 3)  # divides no side of a weight
CONFIG: dict[str, Any] = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [*BLOCK]}
}


def quantized(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights with their linear layers in fp8, and what they stand for."""
    stored, meant = dict(weights), dict(weights)
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if "proj" not in name:
            continue
        blocks = [-(-n // size) for n, size in zip(weight.shape, BLOCK, strict=True)]
        scales = torch.rand(blocks, generator=generator) + 0.5
        stored[name] = weight.to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        rows, columns = weight.shape
        by_element = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        meant[name] = stored[name].float() * by_element[:rows, :columns]
    return stored, meant


def test_a_model_has_the_weights_that_its_blocks_stand_for(tmp_path: Path) -> None:
    stored, meant = quantized(llama_weights())
    own = load_model(write_checkpoint(tmp_path / "fp8", stored, **CONFIG))
    expected = load_model(write_checkpoint(tmp_path / "wide", meant))
    tokens = torch.arange(10)
    assert torch.equal(logits_of(own, tokens), logits_of(expected, tokens))


def test_a_part_of_a_weight_has_the_scales_of_its_blocks(tmp_path: Path) -> None:
    stored, meant = quantized(llama_weights())
    name = "model.layers.1.mlp.gate_proj.weight"
    with Checkpoint(write_checkpoint(tmp_path, stored), quantization=Fp8(BLOCK)) as checkpoint:
        for part in ((slice(4, 7), slice(0, 8)), (slice(0, 12), slice(2, 7))):
            assert torch.equal(checkpoint.read_part(name, part), meant[name][part])


def test_scales_of_another_shape_and_fp8_without_scales_are_refused(tmp_path: Path) -> None:
    stored, _ = quantized(llama_weights())
    name = "model.layers.0.mlp.up_proj.weight"
    for spoiled, message in (
        ({f"{name}_scale_inv": torch.ones(2, 3)}, r"has the shape \(2, 3\); expected \(3, 3\)"),
        ({f"{name}_scale_inv": None}, "up_proj.weight is F8_E4M3"),
    ):
        kept = {key: value for key, value in {**stored, **spoiled}.items() if value is not None}
        directory = write_checkpoint(tmp_path, kept, **CONFIG)
        with pytest.raises(ConfigError, match=message):
            load_model(directory)


@pytest.mark.parametrize("name", FORMATS)
def test_the_cpu_reads_every_published_format(name: str, tmp_path: Path) -> None:
    form, (stored, meant) = FORMATS[name], published(FORMATS[name])
    own = write_checkpoint(tmp_path / "own", stored, quantization_config=form.config, **SIZES)
    expected = load_model(write_checkpoint(tmp_path / "wide", meant, **SIZES))
    tokens = torch.arange(3)
    torch.testing.assert_close(
        logits_of(load_model(own), tokens), logits_of(expected, tokens), rtol=1e-4, atol=1e-4
    )


def test_a_rank_keeps_whole_blocks_and_widens_cut_ones(tmp_path: Path) -> None:
    stored, meant = quantized(llama_weights())
    name = "model.layers.1.mlp.gate_proj.weight"  # [12, 8]
    with Checkpoint(write_checkpoint(tmp_path, stored), quantization=Fp8(BLOCK)) as checkpoint:
        for part in ((slice(5, 10), slice(3, 8)), (slice(10, 12), slice(0, 3))):
            found = checkpoint.read_quantized(name, part)
            assert found is not None
            assert torch.equal(found.widened(), meant[name][part])
        for part in ((slice(4, 10), slice(0, 3)), (slice(0, 5), slice(0, 4))):
            assert checkpoint.read_quantized(name, part) is None


@pytest.mark.parametrize(("sections", "is_kept"), [((10, 10, 10), True), ((12, 8, 10), False)])
def test_a_rank_keeps_the_blocks_of_its_part_of_each_section(
    sections: tuple[int, ...], is_kept: bool, tmp_path: Path
) -> None:
    stored, meant = quantized({"a.in_proj_qkv.weight": torch.randn(30, 6)})
    made: list[Linear] = []

    def prepare(linear: Linear, device: torch.device, *, dtype: torch.dtype) -> Linear:
        made.append(linear)
        return linear

    with Checkpoint(write_checkpoint(tmp_path, stored), quantization=Fp8(BLOCK)) as checkpoint:
        name, progress = "in_proj_qkv.weight", LoadProgress(0, dtype=torch.float32)
        shard = Shard(1, 2, {name: 0}, sections={name: sections})
        target = Target(prepare=prepare, shard=shard)
        source = WeightReader(checkpoint, target, dtype=torch.float32, progress=progress)
        source.linear({"a.in_proj_qkv": 15}, in_features=6, bias=False)
    parts = meant[f"a.{name}"].split(sections)
    assert torch.equal(made[0].weight, torch.cat([part[len(part) // 2 :] for part in parts]))
    assert isinstance(made[0], QuantizedLinear) is is_kept


def test_joined_weights_share_the_largest_input_scale() -> None:
    parts = [
        Fp8Weight(torch.ones(2, 4).to(torch.float8_e4m3fn), torch.ones(2, 1), (1, 4), scale)
        for scale in (torch.tensor([0.5]), torch.tensor([2.0]))
    ]
    whole = joined(parts)
    assert isinstance(whole, Fp8Weight)
    assert whole.input_scale is not None
    assert whole.input_scale.tolist() == [2.0]
    assert joined([parts[0], replace(parts[1], block=(2, 4), scales=torch.ones(1, 1))]) is None
    cut = replace(parts[0], block=(4, 4), scales=torch.ones(1, 1))
    assert joined([cut, cut]) is None


def test_memory_is_that_of_the_bits_of_each_layer() -> None:
    inventory = Inventory(torch.bfloat16)
    embeddings = inventory.tensor("embed.weight", (100, 16))
    inventory.linear({"q": 16, "k": 8}, in_features=16, bias=True)
    inventory.linear({"o": 16}, in_features=16, bias=False)
    inventory.tied_linear("head", embeddings)
    plain = 2 * (1600 + 24 * 16 + 24 + 256)
    assert inventory.held_bytes(LinearBits()) == inventory.size_bytes == plain
    rounded = 2 * (1600 + 24) + 24 * 16 + 256 + 1600
    assert inventory.held_bytes(LinearBits(every=8)) == rounded  # the head has a copy
    kept = 2 * (1600 + 24 * 16 + 24)
    for stored, factors, size in (
        (StoredBits(4), 32, 128),
        (StoredBits(4, 16), 32, 128 + 64),
        (StoredBits(4, 16), 64, 128 + 128),
        (StoredBits(8), 64, 256),
    ):
        bits = LinearBits(factors=factors)
        assert inventory.held_bytes(bits, {"o.weight": stored}.get) == kept + size


def test_more_memory_than_the_quantized_weights_need_is_not_asked_for(tmp_path: Path) -> None:
    form, (stored, _) = FORMATS["fp8 in blocks"], published(FORMATS["fp8 in blocks"])
    own = write_checkpoint(tmp_path, stored, quantization_config=form.config, **SIZES)
    size = sum(tensor.nbytes for name, tensor in stored.items() if "scale" not in name)
    target = Target(memory_bytes=size, bits=LinearBits(factors=64))
    model = load_model(own, target=replace(target, memory_bytes=None))
    assert isinstance(model, Decoder)
    table_bytes = sum(rotary.table.nbytes for rotary in model.rotaries)
    load_model(own, target=replace(target, memory_bytes=size + table_bytes))
    with pytest.raises(ConfigError, match="weights need"):
        load_model(own, target=replace(target, memory_bytes=size - 1))
    with pytest.raises(ConfigError, match="weights need"):
        load_model(own, target=Target(memory_bytes=size))
