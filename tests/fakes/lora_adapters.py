"""Random LoRA adapters of the bundled model, or of another one, in PEFT's format, and the model
with one merged in.

transformers' peft is not needed: the files are what its `save_pretrained` writes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.tiny import MODEL_DIR

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """How an adapter is made; `config` are further fields of its adapter_config.json."""

    seed: int
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = (*ATTENTION, *MLP)
    config: dict[str, Any] = field(default_factory=dict)


# Eight adapters that differ in all that PEFT's format has.
RECIPES = (
    Recipe(1),
    Recipe(2, rank=1, alpha=4),
    Recipe(3, rank=16, targets=("q_proj", "v_proj")),
    Recipe(4, rank=3, alpha=6, targets=MLP),
    Recipe(5, config={"use_rslora": True}),
    Recipe(6, rank=4, config={"rank_pattern": {"down_proj": 12}, "alpha_pattern": {"up_proj": 9}}),
    Recipe(7, targets=("o_proj", "down_proj")),
    Recipe(8, config={"rank_pattern": {"model.layers.2.self_attn.k_proj": 2}}),
)


def write_adapter(directory: Path, recipe: Recipe, *, model_dir: Path = MODEL_DIR) -> Path:
    """Writes an adapter that changes the model's tokens; returns the directory."""
    base = load_file(model_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(recipe.seed)
    tensors: dict[str, Tensor] = {}
    for name in modules_of(recipe, base):
        num_out, num_in = base[f"{name}.weight"].shape
        rank = rank_of(recipe, name)
        size = 0.5 / math.sqrt(rank * num_in)
        shapes = {"A": (rank, num_in), "B": (num_out, rank)}
        for letter, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * math.sqrt(size)
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = values
    config = {
        "peft_type": "LORA",
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "target_modules": list(recipe.targets),
        "bias": "none",
        "base_model_name_or_path": "aserve-tiny",
        **recipe.config,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def write_merged(
    directory: Path, adapter: Path, recipe: Recipe, *, model_dir: Path = MODEL_DIR
) -> Path:
    """Writes the model with the adapter's weights added to its own, in float64."""
    shutil.copytree(model_dir, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    weights = {
        name: tensor.double() for name, tensor in load_file(model_dir / "model.safetensors").items()
    }
    found = load_file(adapter / "adapter_model.safetensors")
    for name in modules_of(recipe, weights):
        a, b = (found[f"base_model.model.{name}.lora_{letter}.weight"].double() for letter in "AB")
        weights[f"{name}.weight"] += scale_of(recipe, name) * (b @ a)
    save_file(weights, directory / "model.safetensors")
    return directory


def modules_of(recipe: Recipe, weights: Iterable[str]) -> list[str]:
    """`weights` are the names of the model's tensors."""
    layers = (name.removesuffix(".weight") for name in sorted(weights))
    return [layer for layer in layers if layer.rpartition(".")[2] in recipe.targets]


def rank_of(recipe: Recipe, name: str) -> int:
    return int(_patterned(recipe, "rank_pattern", name, recipe.rank))


def scale_of(recipe: Recipe, name: str) -> float:
    rank = rank_of(recipe, name)
    root = math.sqrt(rank) if recipe.config.get("use_rslora") else rank
    return _patterned(recipe, "alpha_pattern", name, recipe.alpha) / root


def _patterned(recipe: Recipe, pattern: str, name: str, default: float) -> float:
    found = [v for key, v in recipe.config.get(pattern, {}).items() if name.endswith(key)]
    return float(found[0]) if found else default
