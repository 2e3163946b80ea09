"""Experts in MXFP4, against transformers' conversion and the same model in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from aserve.errors import ConfigError
from aserve.gpu.weights.checkpoint import Checkpoint
from tests.load_model import load_model
from tests.parity.dense_attend import logits_of

NAME = "model.layers.1.mlp.experts.down_proj"


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


def test_a_part_is_that_of_the_whole_tensor(folders: tuple[Path, Path]) -> None:
    own, wide = folders
    with Checkpoint(own) as checkpoint, Checkpoint(wide) as expected:
        part = (slice(1, 2), slice(3, 30), slice(0, 64))
        assert torch.equal(checkpoint.read_part(NAME, part), expected.read(NAME)[part])


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
