"""Experts that a checkpoint has in fp8 stay in fp8 on CUDA, and mean what they are widened to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.cuda.ops import GroupedKernel
from aserve.gpu.device.cuda.quantized import GroupedFp8Linear
from aserve.gpu.layers.grouped_linear import GroupedLinearOp
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.format import WeightRequest
from aserve.gpu.weights.fp8 import Fp8, Fp8Experts
from aserve.gpu.weights.inventory import Inventory
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.source import ExpertPart, LinearBits, LoadProgress, Shard, Target
from tests.architecture.source import ROOT
from tests.fakes.cuda import FakeCuda
from tests.gpu.weights.checkpoints import write_checkpoint
from tests.gpu.weights.published import in_fp8, of_groups
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of

MODEL = ROOT / "tests" / "models" / "moe"
EXPERTS = "model.layers.0.mlp.experts"
HIDDEN, SIZE, COUNT = 128, 96, 8
CHANNELS = of_groups("channel")


def of_blocks(rows: int, columns: int) -> Mapping[str, object]:
    return {"quant_method": "fp8", "weight_block_size": [rows, columns]}


def write_models(
    folder: Path, block: tuple[int, int] | None, config: Mapping[str, object]
) -> tuple[Path, Path]:
    """The first layer of the small mixture with its linear layers in fp8, and widened."""
    loaded = load_file(MODEL / "model.safetensors")
    meant = {
        name: weight.float()
        for name, weight in loaded.items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    stored, generator = dict(meant), torch.Generator().manual_seed(1)
    quantize = in_fp8(block, "_scale" if block is None else "_scale_inv")
    for name in [name for name in meant if "_proj.weight" in name]:
        layer, values = name.removesuffix(".weight"), meant[name]
        for suffix, tensor in quantize(values, generator):
            if suffix:
                stored[f"{layer}.{suffix}"] = tensor
            else:
                meant[name] = tensor
    fields = json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": 1}
    own = write_checkpoint(folder / "own", stored, **fields, quantization_config=config)
    return own, write_checkpoint(folder / "wide", meant, **fields)


def fp8_target(made: list[GroupedLinearOp]) -> Target:
    """As on CUDA without products of fp8, whose activations are never rounded."""
    cuda = FakeCuda()
    cuda.has_fp8 = False
    request = WeightRequest("float32", None, 1, stored_quantization="fp8")
    form = CudaDevice(cuda).weight_format(request)
    assert form.prepare_fp8_experts is not None
    prepare = form.prepare_fp8_experts

    def noted(
        weights: Fp8Experts, biases: Tensor | None, /, *, dtype: torch.dtype
    ) -> GroupedLinearOp:
        made.append(prepare(weights, biases, dtype=dtype))
        return made[-1]

    return Target(
        prepare=form.prepare, prepare_grouped=form.prepare_grouped, prepare_fp8_experts=noted
    )


@pytest.mark.parametrize(
    ("block", "config", "kind"),
    [
        ((32, 32), of_blocks(32, 32), GroupedFp8Linear),
        (None, CHANNELS, GroupedFp8Linear),
        ((16, 24), of_blocks(16, 24), GroupedKernel),  # blocks that the kernel does not support
    ],
    ids=["blocks", "channels", "odd blocks"],
)
def test_experts_are_multiplied_as_their_checkpoint_has_them(
    block: tuple[int, int] | None, config: Mapping[str, object], kind: type, tmp_path: Path
) -> None:
    own, wide = write_models(tmp_path, block, config)
    made: list[GroupedLinearOp] = []
    model, expected = load_model(own, target=fp8_target(made)), load_model(wide)
    tokens = torch.tensor([7, 100, 3])
    torch.testing.assert_close(
        logits_of(model, tokens), logits_of(expected, tokens), rtol=1e-3, atol=1e-3
    )
    assert [type(layer) for layer in made] == [kind, kind]


def stack_of(own: Path, target: Target, parts: Mapping[str, int]) -> Tensor | Fp8Experts:
    progress = LoadProgress(0, dtype=torch.float32)
    with Checkpoint(own, quantization=Fp8((32, 32))) as checkpoint:
        reader = WeightReader(checkpoint, target, dtype=torch.float32, progress=progress)
        return reader.stacked(EXPERTS, parts, count=COUNT, in_features=HIDDEN)


def test_a_rank_keeps_its_rows_in_fp8_and_widens_cut_blocks_and_experts_that_may_move(
    tmp_path: Path,
) -> None:
    own, wide = write_models(tmp_path, (32, 32), of_blocks(32, 32))
    target, parts = fp8_target([]), {"gate_proj": SIZE, "up_proj": SIZE}
    meant = load_file(wide / "model.safetensors")
    rows = [meant[f"{EXPERTS}.{i}.{part}.weight"] for i in range(COUNT) for part in parts]
    kept = stack_of(own, target, parts)
    assert isinstance(kept, Fp8Experts)
    expected = torch.cat(rows).view(COUNT, 2 * SIZE, HIDDEN)
    assert torch.equal(kept.widened(torch.float32), expected)

    axes = {f"{part}.weight": 0 for part in parts}
    third = stack_of(own, replace(target, shard=Shard(1, 3, axes)), dict.fromkeys(parts, SIZE // 3))
    assert isinstance(third, Fp8Experts)
    ours = expected.view(COUNT, 2, 3, SIZE // 3, HIDDEN)[:, :, 1].flatten(1, 2)
    assert torch.equal(third.widened(torch.float32), ours)
    half = stack_of(own, replace(target, shard=Shard(1, 2, axes)), dict.fromkeys(parts, SIZE // 2))
    assert isinstance(half, Tensor)
    placed = stack_of(own, replace(target, shard=Shard(experts=ExpertPart(1, 2))), parts)
    assert isinstance(placed, Tensor)
    assert torch.equal(placed, expected[COUNT // 2 :])


def test_memory_is_asked_for_the_bits_of_the_experts_that_stay_in_fp8() -> None:
    inventory = Inventory(torch.bfloat16)
    inventory.stacked("m.experts", {"up": 32, "gate": 32}, count=4, in_features=16)
    inventory.tensor("norm", (16,))
    plain = 2 * (4 * 64 * 16 + 16)
    bits = LinearBits(kept=8, kept_experts=8)
    assert inventory.held_bytes(bits, lambda _name: True) == 4 * 64 * 16 + 32
    assert inventory.held_bytes(bits, lambda name: ".up" in name) == plain - 4 * 32 * 16
    assert inventory.held_bytes(LinearBits(kept=8), lambda _name: True) == plain
    placed = Inventory(torch.bfloat16, Shard(experts=ExpertPart(0, 2)))
    placed.stacked("m.experts", {"up": 32}, count=4, in_features=16)
    assert placed.held_bytes(bits, lambda _name: True) == 2 * 2 * 32 * 16
