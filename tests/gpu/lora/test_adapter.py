"""What is no adapter, or one that would give other results than in PEFT, is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.lora.adapter import read_adapter
from aserve.gpu.lora.tables import LoraTables
from aserve.gpu.weights.source import Target
from aserve.tiny import MODEL_DIR
from tests.fakes.lora_adapters import Recipe, write_adapter
from tests.load_model import load_model

Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIGS: dict[str, dict[str, Any]] = {
    "IA3": {"peft_type": "IA3"},
    "bias": {"bias": "all"},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "lora_bias": {"lora_bias": True},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "target_parameters": {"target_parameters": ["experts.gate"]},
    "init_lora_weights": {"init_lora_weights": "pissa_niter_4"},
    "regular expression": {"rank_pattern": {"model.layers.[01].*": 4}},
    "its rank is 4": {"r": 4},
    "its rank is 8.5": {"rank_pattern": {"q_proj": 8.5}},
    "--max-lora-rank 16": {"r": 17},
    "lora_alpha": {"lora_alpha": "x"},
}
TENSORS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "lora_magnitude_vector": lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(2)}),
    "only one of the matrices": lambda t: t.__delitem__(f"{Q}.lora_B.weight"),
    "no adapters for model.layers.9.mlp.up_proj": lambda t: t.update(
        {
            "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(8, 128),
            "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": torch.ones(384, 8),
        }
    ),
    "for a weight of 256 x 64": lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 64)}),
    "q_proj has weights of a type that is not read: int8": lambda t: t.update(
        {f"{Q}.lora_A.weight": torch.ones(8, 128, dtype=torch.int8)}
    ),
    "q_proj has weights of a type that is not read: float8_e4m3fn": lambda t: t.update(
        {f"{Q}.lora_B.weight": torch.ones(256, 8).to(torch.float8_e4m3fn)}
    ),
    "not finite": lambda t: t.update({f"{Q}.lora_A.weight": torch.full((8, 128), torch.inf)}),
}


@pytest.fixture(scope="module")
def tables() -> LoraTables:
    made = LoraTables(max_loras=1, max_rank=16)
    load_model(MODEL_DIR, target=Target(wrap=made.wrap))
    return made


@pytest.mark.parametrize("reason", CONFIGS)
def test_a_config_that_asks_for_more_is_refused_by_name(tmp_path: Path, reason: str) -> None:
    rank = CONFIGS[reason].get("r", 8)
    recipe = Recipe(1, rank=rank if rank > 8 else 8, targets=("q_proj",), config=CONFIGS[reason])
    with pytest.raises(ConfigError, match=reason):
        read_adapter(write_adapter(tmp_path, recipe), max_rank=16)


@pytest.mark.parametrize("reason", TENSORS)
def test_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, tables: LoraTables, reason: str
) -> None:
    path = write_adapter(tmp_path, Recipe(1, targets=("q_proj",))) / "adapter_model.safetensors"
    tensors = load_file(path)
    TENSORS[reason](tensors)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=reason):
        tables.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("adapter_config.json", None),
        ("adapter_config.json", b"[1]"),
        ("adapter_config.json", b"{" * 100_000),
        ("adapter_config.json", json.dumps({"r": "8", "lora_alpha": 1}).encode()),
        ("adapter_model.safetensors", None),
        ("adapter_model.safetensors", b"\xff" * 40),
    ],
)
def test_a_broken_file_is_an_error_with_its_name(
    tmp_path: Path, name: str, data: bytes | None
) -> None:
    path = write_adapter(tmp_path, Recipe(1, targets=("q_proj",))) / name
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=name):
        read_adapter(tmp_path, max_rank=16)
