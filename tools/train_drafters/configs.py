"""The parts of config.json that several drafters share, in the keys of published checkpoints."""

from dataclasses import asdict, replace

from tools.train_tiny.network import Shape
from tools.train_tiny.tokenizer import BOS, EOS, EOT, PAD

SPECIAL_IDS: dict[str, object] = {
    "bos_token_id": BOS,
    "eos_token_id": [EOS, EOT],
    "pad_token_id": PAD,
}


def draft_shape(target: Shape, *, num_layers: int, intermediate_size: int) -> Shape:
    """A drafter of the target's hidden size, whose layers have two heads and one KV head."""
    return replace(
        target,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


def llama_config(shape: Shape, architecture: str) -> dict[str, object]:
    """The keys that Llama and its drafters have, as transformers 4 wrote them."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **asdict(shape),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **SPECIAL_IDS,
        "torch_dtype": "bfloat16",
    }
