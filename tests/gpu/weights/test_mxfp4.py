"""Experts in MXFP4, against transformers' conversion and the same model in bfloat16."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from aserve.errors import ConfigError
from aserve.gpu.device.cpu.isa import read_isa
from aserve.gpu.device.cpu.kernel_linear import QuantLinear
from aserve.gpu.device.cpu.linear import LinearPerExpert
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.cuda.quantized import GroupedCodedLinear
from aserve.gpu.layers.grouped_linear import ExpertWeights, GroupedLinearOp
from aserve.gpu.layers.linear import Prepare
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.format import WeightFormat, WeightRequest
from aserve.gpu.weights.mxfp4 import VALUES, Mxfp4Weight
from aserve.gpu.weights.quantized import QuantizedLinear
from aserve.gpu.weights.source import CPU, Target
from aserve_kernels.cpu.quant_codes import E2M1, dequantized, pack_e2m1
from tests.fakes.cuda import FakeCuda
from tests.kernels.conftest import _exact_rounding  # noqa: F401
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of

EXPERTS = "model.layers.1.mlp.experts"
NAME = f"{EXPERTS}.down_proj"
# The tensor and the rows that each part has.
PARTS = {
    "gate_proj": ("gate_up_proj", slice(0, None, 2)),
    "up_proj": ("gate_up_proj", slice(1, None, 2)),
    "down_proj": ("down_proj", slice(None)),
}


def packed(weight: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a tensor of this shape, [experts, in, out]."""
    generator = torch.Generator().manual_seed(seed)
    experts, num_in, num_out = weight.shape
    shape = (experts, num_out, num_in // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in MXFP4, in two shards, and the same one in bfloat16, as transformers widens it."""
    own, wide = (tmp_path_factory.mktemp(name) for name in ("mxfp4", "wide"))
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    torch.manual_seed(1)
    GptOssForCausalLM(config).bfloat16().save_pretrained(wide)
    meant = load_file(wide / "model.safetensors")
    stored = dict(meant)
    for seed, name in enumerate(sorted(name for name in meant if name.endswith("_proj"))):
        if "experts" not in name:
            continue
        blocks, scales = packed(stored.pop(name), seed)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = _convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(meant, wide / "model.safetensors")
    shards: tuple[dict[str, Tensor], ...] = ({}, {}, {})
    for number, name in enumerate(sorted(stored)):
        shards[number % 3][name] = stored[name]
    index: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, own / f"part-{number}.safetensors")
        index |= dict.fromkeys(tensors, f"part-{number}.safetensors")
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    fields = json.loads((wide / "config.json").read_text())
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (own / "config.json").write_text(json.dumps({**fields, "quantization_config": quantized}))
    return own, wide


def test_a_model_in_mxfp4_is_that_of_its_widened_weights(folders: tuple[Path, Path]) -> None:
    own, wide = folders
    ids = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(3))
    logits = logits_of(load_model(own), ids)
    assert torch.equal(logits, logits_of(load_model(wide), ids))
    reference = GptOssForCausalLM.from_pretrained(wide, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("part", PARTS)
def test_a_matrix_is_its_experts_part_of_the_whole_tensor(
    part: str, folders: tuple[Path, Path]
) -> None:
    """Stored as blocks and as numbers, whole and in parts."""
    name, rows = PARTS[part]
    whole = load_file(folders[1] / "model.safetensors")[f"{EXPERTS}.{name}"][1].T[rows]
    for folder in folders:
        with Checkpoint(folder) as checkpoint:
            matrix = f"{EXPERTS}.1.{part}.weight"
            assert checkpoint.tensors[matrix].shape == whole.shape
            assert torch.equal(checkpoint.read(matrix), whole.to(checkpoint.read(matrix).dtype))
            own_part = (slice(3, 30), slice(7, 20))
            assert torch.equal(checkpoint.read_part(matrix, own_part).float(), whole[own_part])


def test_a_part_in_whole_groups_stays_in_mxfp4(folders: tuple[Path, Path]) -> None:
    name = f"{EXPERTS}.2.up_proj.weight"  # [32, 64]
    with Checkpoint(folders[0]) as checkpoint:
        whole = checkpoint.read(name)
        kept = checkpoint.read_quantized(name, (slice(5, 20), slice(32, 64)))
        assert isinstance(kept, Mxfp4Weight)
        assert torch.equal(kept.widened(), whole[5:20, 32:])
        assert checkpoint.read_quantized(name, (slice(0, 32), slice(8, 64))) is None
    with Checkpoint(folders[1]) as checkpoint:
        assert checkpoint.read_quantized(name, (slice(5, 20), slice(32, 64))) is None


@dataclass
class Made:
    """The layers of experts that were made."""

    grouped: list[GroupedLinearOp] = field(default_factory=list)

    def target(self, form: WeightFormat) -> Target:
        def prepare_grouped(
            weights: ExpertWeights, biases: Tensor | None, prepare: Prepare, /
        ) -> GroupedLinearOp:
            self.grouped.append(form.prepare_grouped(weights, biases, prepare))
            return self.grouped[-1]

        return Target(prepare=form.prepare, prepare_grouped=prepare_grouped)


def form_of(device: str) -> WeightFormat:
    request = WeightRequest("float32", None, 1, stored_quantization="mxfp4")
    if device == "cpu":
        return choose_cpu_format(request, read_isa())
    return CudaDevice(FakeCuda()).weight_format(request)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_stay_in_mxfp4(
    device: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU rounds the inputs to integers."""
    own, wide = folders
    ids = torch.randint(0, 64, (5,), generator=torch.Generator().manual_seed(3))
    expected, made = logits_of(load_model(wide), ids), Made()
    monkeypatch.setattr(Mxfp4Weight, "widened", refuse)
    logits = logits_of(load_model(own, target=made.target(form_of(device))), ids)
    error = (logits - expected).norm() / expected.norm()
    assert 0 < error < (1e-4 if device == "cuda" else 0.02)
    if device == "cuda":
        assert all(isinstance(layer, GroupedCodedLinear) for layer in made.grouped)
    else:
        experts = [each for layer in made.grouped for each in experts_of(layer)]
        assert {(each.weight.kind, each.weight.group) for each in experts} == {(E2M1, 32)}
        assert len(experts) == 2 * 2 * 3


def refuse(_weight: Mxfp4Weight) -> Tensor:
    raise AssertionError("a weight was widened")


def experts_of(layer: GroupedLinearOp) -> list[QuantLinear]:
    assert isinstance(layer, LinearPerExpert)
    return [each for each in layer.experts if isinstance(each, QuantLinear)]


def test_every_element_and_scale_is_exact_on_the_cpu() -> None:
    """Also of the smallest and largest scales that checkpoints have."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    exponents = torch.arange(110, 142, 2, dtype=torch.uint8).view(16, 1)
    weight = Mxfp4Weight(blocks, exponents)
    packed = pack_e2m1(weight.elements, weight.exponents, None)
    scales = 2.0 ** (exponents.float() - 127)
    pairs = torch.arange(256)
    values = torch.tensor(VALUES)[torch.stack((pairs % 16, pairs // 16), dim=1)].view(16, 32)
    assert torch.equal(dequantized(packed), values * scales)
    assert torch.equal(weight.widened(), values * scales)


def test_a_weight_takes_4_and_a_quarter_bits_on_the_cpu() -> None:
    blocks, exponents = packed(torch.empty(1, 96, 64), seed=1)
    stored = Mxfp4Weight(blocks[0], exponents[0])
    layer = form_of("cpu").prepare(QuantizedLinear(stored, None), CPU, dtype=torch.float32)
    assert isinstance(layer, QuantLinear)
    assert 8 * (layer.weight.codes.nbytes + layer.weight.factors.nbytes) == 4.25 * 96 * 64


@pytest.mark.parametrize("lacks", ["_scales", "_blocks"])
def test_blocks_without_scales_and_scales_without_blocks_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, lacks: str
) -> None:
    own, _ = folders
    tensors = {
        name: tensor
        for path in own.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    del tensors[f"{NAME}{lacks}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((own / "config.json").read_text())
    with pytest.raises(ConfigError, match="down_proj"):
        load_model(tmp_path)
