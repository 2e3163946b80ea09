"""Writes the model's folder in Hugging Face format, and reads it into the network."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.train_tiny.network import Llama, Shape
from tools.train_tiny.tokenizer import BOS, EOS, EOT, PAD, save_tokenizer

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def export(network: Llama, tokenizer: Tokenizer, model_dir: Path) -> None:
    model_dir.mkdir(parents=True, exist_ok=True)
    write_json(model_dir / CONFIG, config_of(network.shape))
    write_json(
        model_dir / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": [EOS, EOT], "pad_token_id": PAD, "do_sample": False},
    )
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in network.named_parameters()
    }
    save_file(weights, model_dir / WEIGHTS, metadata={"format": "pt"})
    (model_dir / WEIGHTS).chmod(0o644)
    save_tokenizer(tokenizer, model_dir, max_len=network.shape.max_position_embeddings)


def config_of(shape: Shape) -> dict[str, object]:
    sizes = asdict(shape)
    theta = sizes.pop("rope_theta")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        # transformers reads the first from version 5 on; older versions read the second.
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, EOT],
        "pad_token_id": PAD,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_network(model_dir: Path) -> Llama:
    """Returns the network in float32, whatever the dtype of the file."""
    config = json.loads((model_dir / CONFIG).read_text(encoding="utf-8"))
    network = Llama(Shape(**{name: config[name] for name in asdict(Shape())}))
    weights = {name: weight.float() for name, weight in load_file(model_dir / WEIGHTS).items()}
    network.load_state_dict(weights)
    return network.eval()
