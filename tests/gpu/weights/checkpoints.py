"""Writes tiny checkpoints by hand, so that tests can spoil one thing at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def llama_weights(
    *,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    hidden_size: int = 8,
    intermediate_size: int = 12,
) -> dict[str, Tensor]:
    """Of CONFIG, or of other sizes, each different from the others."""
    hidden, inner = hidden_size, intermediate_size
    shapes = {
        "model.embed_tokens.weight": (24, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (24, hidden),
    }
    for index in range(num_layers):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (hidden // 2, hidden),
            f"{prefix}.self_attn.v_proj.weight": (hidden // 2, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def write_config(directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory


def write_checkpoint(directory: Path, weights: Mapping[str, Tensor], **changes: object) -> Path:
    write_config(directory, **changes)
    save_file(dict(weights), directory / "model.safetensors")
    return directory


def write_sharded(
    directory: Path, shards: Mapping[str, Mapping[str, Tensor]], **changes: object
) -> Path:
    """`shards`: file name -> its tensors.

    The index names each tensor in the last file that has it.
    """
    write_config(directory, **changes)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        save_file(dict(tensors), directory / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
