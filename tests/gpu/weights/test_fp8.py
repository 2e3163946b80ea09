"""Checkpoints in fp8 with a scale per block, against the same weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.fp8 import Fp8
from tests.gpu.weights.checkpoints import llama_weights, write_checkpoint
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
