"""Experts that a checkpoint has quantized stay so on CUDA, and mean what they are widened to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.cuda.ops import GroupedKernel
from aserve.gpu.device.cuda.quantized import GroupedCodedLinear
from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp, Groups, widened
from aserve.gpu.layers.linear import Prepare
from aserve.gpu.parallel.collectives import ALONE
from aserve.gpu.parallel.source import for_rank
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.experts import StoredExperts
from aserve.gpu.weights.format import WeightRequest
from aserve.gpu.weights.fp8 import Fp8
from aserve.gpu.weights.int4 import Method
from aserve.gpu.weights.inventory import Inventory
from aserve.gpu.weights.quantized import Quantization, StoredBits
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.source import ExpertPart, LinearBits, LoadProgress, Shard, Target
from aserve_kernels.grouped_linear import grouped_linear_ref
from tests.fakes.cuda import FakeCuda
from tests.gpu.weights.mixtures import COUNT, EXPERTS, HIDDEN, PARTS, SIZE, write_mixtures
from tests.gpu.weights.published import in_4_bits, in_fp8, of_groups
from tests.gpu.weights.test_int4 import CONFIGS
from tests.kernels.tolerance import draw
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of

FP8_BLOCKS = Fp8((32, 32))
CHANNELS = of_groups("channel")


def of_blocks(rows: int, columns: int) -> Mapping[str, object]:
    return {"quant_method": "fp8", "weight_block_size": [rows, columns]}


def fp8(block: tuple[int, int] | None) -> Any:
    return in_fp8(block, "_scale" if block is None else "_scale_inv")


def target_of(made: list[GroupedLinearOp], stored: str | None, name: str | None = None) -> Target:
    """As on CUDA without products of fp8, whose activations are never rounded."""
    cuda = FakeCuda()
    cuda.has_fp8 = False
    request = WeightRequest("float32", None, 1, quantization=name, stored_quantization=stored)
    form = CudaDevice(cuda).weight_format(request)

    def noted(
        weights: ExpertWeights, biases: Tensor | None, prepare: Prepare, /
    ) -> GroupedLinearOp:
        made.append(form.prepare_grouped(weights, biases, prepare))
        return made[-1]

    return Target(prepare=form.prepare, prepare_grouped=noted)


@pytest.mark.parametrize(
    ("quantize", "config", "kind"),
    [
        (fp8((32, 32)), of_blocks(32, 32), GroupedCodedLinear),
        (fp8(None), CHANNELS, GroupedCodedLinear),
        (fp8((16, 24)), of_blocks(16, 24), GroupedKernel),  # that the kernel does not support
        *((in_4_bits(each, 32), CONFIGS[each], GroupedCodedLinear) for each in CONFIGS),
        (in_4_bits("awq", 16), CONFIGS["awq"], GroupedKernel),
    ],
    ids=["blocks", "channels", "odd blocks", *CONFIGS, "odd groups"],
)
def test_experts_are_multiplied_as_their_checkpoint_has_them(
    quantize: Any, config: Mapping[str, object], kind: type, tmp_path: Path
) -> None:
    own, wide = write_mixtures(tmp_path, quantize, config)
    made: list[GroupedLinearOp] = []
    stored = "fp8" if "fp8" in str(config) or config == CHANNELS else "int4"
    model, expected = load_model(own, target=target_of(made, stored)), load_model(wide)
    tokens = torch.tensor([7, 100, 3])
    torch.testing.assert_close(
        logits_of(model, tokens), logits_of(expected, tokens), rtol=1e-3, atol=1e-3
    )
    assert [type(layer) for layer in made] == [kind, kind]


@pytest.mark.parametrize(("name", "most"), [("fp8", 0.05), ("int8", 0.01), ("int4", 0.15)])
def test_experts_are_rounded_while_they_are_loaded(name: str, most: float) -> None:
    """One of them has only zeros, which need no offsets."""
    made: list[GroupedLinearOp] = []
    target = target_of(made, None, name)
    weights, biases, x = draw(3, 70, 100, seed=1), draw(3, 70, seed=2), draw(6, 100)
    weights[1] = 0
    layer = target.prepare_grouped(weights, biases, target.prepare)
    assert isinstance(layer, GroupedCodedLinear)
    groups = Groups(*(torch.tensor(each, dtype=torch.int32) for each in ([0, 2, 4], [2, 4, 6])))
    got, expected = layer(x, groups), grouped_linear_ref(x, weights, biases, *groups)
    error = (got - expected).norm() / expected.norm()
    assert 0 < error < most
    assert torch.equal(got[2:4], expected[2:4])


def test_moved_experts_are_not_rounded() -> None:
    """Their weights are numbers that ranks exchange, and graphs read them where they are."""
    cuda = CudaDevice(FakeCuda())
    form = cuda.weight_format(WeightRequest("float32", None, 1, quantization="int8"))
    target = Target(prepare_grouped=form.prepare_grouped, prepare_moved=form.prepare_moved)
    for are_moved, kind in ((False, GroupedCodedLinear), (True, GroupedKernel)):
        part = ExpertPart(0, 2, are_moved=are_moved)
        own = for_rank(target, ALONE, beside={}, experts=part)
        made = own.prepare_grouped(draw(2, 8, 8), None, own.prepare)
        assert isinstance(made, kind)


def stack_of(
    own: Path,
    target: Target,
    parts: Mapping[str, int],
    *,
    form: Quantization = FP8_BLOCKS,
    in_features: int = HIDDEN,
) -> ExpertWeights:
    progress = LoadProgress(0, dtype=torch.float32)
    with Checkpoint(own, quantization=form) as checkpoint:
        reader = WeightReader(checkpoint, target, dtype=torch.float32, progress=progress)
        return reader.stacked(EXPERTS, parts, count=COUNT, in_features=in_features)


def test_a_rank_keeps_its_rows_in_fp8_and_widens_cut_blocks_and_experts_that_may_move(
    tmp_path: Path,
) -> None:
    own, wide = write_mixtures(tmp_path, fp8((32, 32)), of_blocks(32, 32))
    target, parts = target_of([], "fp8"), PARTS
    meant = load_file(wide / "model.safetensors")
    rows = [meant[f"{EXPERTS}.{i}.{part}.weight"] for i in range(COUNT) for part in parts]
    kept = stack_of(own, target, parts)
    assert isinstance(kept, StoredExperts)
    expected = torch.cat(rows).view(COUNT, 2 * SIZE, HIDDEN)
    assert torch.equal(kept.widened(), expected)

    axes = {f"{part}.weight": 0 for part in parts}
    third = stack_of(own, replace(target, shard=Shard(1, 3, axes)), dict.fromkeys(parts, SIZE // 3))
    assert isinstance(third, StoredExperts)
    ours = expected.view(COUNT, 2, 3, SIZE // 3, HIDDEN)[:, :, 1].flatten(1, 2)
    assert torch.equal(third.widened(), ours)
    half = stack_of(own, replace(target, shard=Shard(1, 2, axes)), dict.fromkeys(parts, SIZE // 2))
    assert isinstance(half, Tensor)
    placed = stack_of(own, replace(target, shard=Shard(experts=ExpertPart(1, 2))), parts)
    assert isinstance(placed, StoredExperts)
    assert torch.equal(placed.widened(), expected[COUNT // 2 :])
    moving = Shard(experts=ExpertPart(1, 2, are_moved=True))
    moved = stack_of(own, replace(target, shard=moving), parts)
    assert isinstance(moved, Tensor)
    assert torch.equal(moved, expected[COUNT // 2 :])


@pytest.mark.parametrize("method", CONFIGS)
def test_a_rank_keeps_the_codes_of_whole_groups_of_its_experts(
    method: Method, tmp_path: Path
) -> None:
    """The inputs of down are divided among ranks: 96 in groups of 32."""
    own, wide = write_mixtures(tmp_path, in_4_bits(method, 32), CONFIGS[method])
    meant = load_file(wide / "model.safetensors")
    down = torch.stack([meant[f"{EXPERTS}.{i}.down_proj.weight"] for i in range(COUNT)])
    axes, target = {"down_proj.weight": 1}, target_of([], "int4")
    for num_ranks, kind in ((1, StoredExperts), (3, StoredExperts), (2, Tensor)):
        shard = Shard(num_ranks - 1, num_ranks, axes)
        part = SIZE // num_ranks
        own_target = replace(target, shard=shard)
        got = stack_of(own, own_target, {"down_proj": HIDDEN}, form=method, in_features=part)
        assert isinstance(got, kind)
        assert torch.equal(widened(got), down[:, :, -part:])


def test_experts_of_several_formats_are_widened(tmp_path: Path) -> None:
    """One part of one expert is stored as numbers."""
    own, wide = write_mixtures(tmp_path, in_4_bits("awq", 32), CONFIGS["awq"])
    name, weights = f"{EXPERTS}.3.up_proj", load_file(own / "model.safetensors")
    meant = load_file(wide / "model.safetensors")[f"{name}.weight"]
    for suffix in ("qweight", "qzeros", "scales"):
        del weights[f"{name}.{suffix}"]
    save_file({**weights, f"{name}.weight": meant}, own / "model.safetensors")
    stack = stack_of(own, target_of([], "int4"), PARTS, form="awq")
    assert isinstance(stack, Tensor)
    assert torch.equal(stack[3, SIZE:], meant)


def test_memory_is_asked_for_the_bits_of_the_experts_that_stay_quantized() -> None:
    inventory = Inventory(torch.bfloat16)
    inventory.stacked("m.experts", {"up": 32, "gate": 32}, count=4, in_features=16)
    inventory.tensor("norm", (16,))
    plain = 2 * (4 * 64 * 16 + 16)
    bits, eight = LinearBits(factors=64), StoredBits(8)
    assert inventory.held_bytes(bits, lambda _name: eight) == 4 * 64 * 16 + 32
    assert inventory.held_bytes(bits, lambda _name: StoredBits(4, 16)) == 4 * 64 * 16 + 32
    assert inventory.held_bytes(bits, lambda _name: StoredBits(4, 64)) == 4 * 64 * 10 + 32
    ups = inventory.held_bytes(bits, lambda name: eight if ".up" in name else None)
    assert ups == plain - 4 * 32 * 16
    assert inventory.held_bytes(LinearBits(), lambda _name: eight) == plain
    assert inventory.held_bytes(LinearBits(every=8)) == 4 * 64 * 16 + 32
    for are_moved, size in ((False, 1), (True, 2)):
        placed = Inventory(torch.bfloat16, Shard(experts=ExpertPart(0, 2, are_moved=are_moved)))
        placed.stacked("m.experts", {"up": 32}, count=4, in_features=16)
        assert placed.held_bytes(bits, lambda _name: StoredBits(8)) == size * 2 * 32 * 16
