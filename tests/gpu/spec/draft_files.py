"""Drafters' checkpoints with random weights, for tests that load them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# A decoder of the bundled model's shape, in the spelling of transformers 4.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
Shapes = Mapping[str, tuple[int, ...]]


def write_draft(
    directory: Path,
    shapes: Shapes,
    config: Mapping[str, Any] = CONFIG,
    *,
    rename: Callable[[str], str] = str,
    integers: Mapping[str, Tensor] | None = None,
    seed: int = 3,
) -> Path:
    """Writes a checkpoint with these tensors, under renamed names. The values of a tensor do not
    depend on its name."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        rename(name): torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)
        for name, shape in sorted(shapes.items())
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, **(integers or {})}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config}))
    return directory


def layer_shapes(prefix: str, *, width: int, in_features: int | None = None) -> Shapes:
    """One decoder layer of CONFIG with hidden size `width`, without its norms."""
    q, kv, mlp = width, width // 2, CONFIG["intermediate_size"]
    wide = in_features or width
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, wide),
        f"{prefix}.self_attn.k_proj.weight": (kv, wide),
        f"{prefix}.self_attn.v_proj.weight": (kv, wide),
        f"{prefix}.self_attn.o_proj.weight": (width, q),
        f"{prefix}.mlp.gate_proj.weight": (mlp, width),
        f"{prefix}.mlp.up_proj.weight": (mlp, width),
        f"{prefix}.mlp.down_proj.weight": (width, mlp),
    }
