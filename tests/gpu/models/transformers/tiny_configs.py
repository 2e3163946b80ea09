"""Configurations of transformers that are small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config_of(family: str, **fields: Any) -> Any:
    import transformers

    return getattr(transformers, f"{family}Config")(**{**SIZES, **fields})


def write_config(directory: Path, family: str, architecture: str, **fields: Any) -> Path:
    config = config_of(family, **fields)
    config.architectures = [architecture]
    config.save_pretrained(directory)
    return directory


def write_model(directory: Path, family: str, **fields: Any) -> Path:
    import transformers

    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family, **fields))
    model.save_pretrained(directory)
    return directory
