"""Makes the settings of a model in Hugging Face's format from a GGUF file's metadata."""

from __future__ import annotations

import msgspec
import numpy as np

from aserve.errors import ConfigError
from aserve.gguf.families import FAMILIES, WITH_EXPERTS, GgufFamily, Settings
from aserve.gguf.metadata import Metadata
from aserve.gguf.pre_tokenizers import PRE_TOKENIZERS

# Texts of tokens behind which a model stops, whatever token the metadata name: those that
# llama.cpp's `llama_vocab` adds to the ends of generation.
ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
        *("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>"),
    }
)
CONTROL = 3  # gguf.TokenType
# Vocabularies of byte pairs whose texts begin with a token even where the file does not say it.
BEGINS = ("llama3", "llama-v3", "llama-bpe")
TOKENS = "tokenizer.ggml.tokens"
YARN = {  # names of GGUF, and those of config.json
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def family_of(file: Metadata) -> GgufFamily:
    family = FAMILIES.get(file.architecture)
    if file.integer("expert_count", 0):
        family = WITH_EXPERTS.get(file.architecture, family)
    if family is None:
        raise ConfigError(
            f"{file.paths[0]}: GGUF files of the architecture {file.architecture!r} are not read, "
            f"only those of {', '.join(FAMILIES)}; take the model's safetensors instead"
        )
    return family


def config_of(file: Metadata, *, dtype: str, is_quantized: bool) -> Settings:
    """Returns config.json."""
    family, embedding = family_of(file), file.tensors.get("token_embd.weight")
    if embedding is None:
        file.refuse("token_embd.weight", None, "the embeddings of all tokens")
    head_dim, rotary_dim = _head_dims(file)
    config: Settings = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": file.integer("embedding_length"),
        "intermediate_size": file.integer("feed_forward_length", 0),
        "num_hidden_layers": file.num_layers,
        "num_attention_heads": file.integer("attention.head_count"),
        "num_key_value_heads": file.integer(
            "attention.head_count_kv", file.integer("attention.head_count")
        ),
        "head_dim": head_dim,
        "partial_rotary_factor": rotary_dim / head_dim,
        "max_position_embeddings": file.integer("context_length"),
        "rms_norm_eps": _norm_eps(file),
        "rope_theta": file.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, family),
        "attention_bias": file.is_in_layers("attn_q.bias"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "dtype": dtype,
    }
    if is_quantized:
        config["quantization_config"] = {"quant_method": "gguf"}
    # NOTE: a family's null stays: without it the field would get the default of the architecture.
    return {name: value for name, value in config.items() if value is not None} | family.settings(
        file
    )


def tokenizer_config_of(file: Metadata) -> Settings:
    """Returns tokenizer_config.json. The tokenizer itself is made of the GGUF file, and cuts texts
    into words by `pre_tokenizer`, if there is one.
    """
    kind, tokens = file.get("tokenizer.ggml.model"), _tokens(file)
    begins = kind == "llama" or file.get("tokenizer.ggml.pre") in BEGINS
    said = file.get("tokenizer.ggml.add_bos_token")
    settings: Settings = {"add_bos_token": begins if said is None else bool(said)}
    for name in ("bos", "eos"):
        number = file.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            settings[f"{name}_token"] = tokens[number]
    if kind == "gpt2":
        named = file.get("tokenizer.ggml.pre") or "default"
        own = PRE_TOKENIZERS.get(str(named))
        settings["pre_tokenizer"] = {"name": named, **(msgspec.structs.asdict(own) if own else {})}
    template = file.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return settings


def generation_config_of(file: Metadata) -> Settings:
    """Returns generation_config.json: the tokens behind which the model stops."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    named = [number for number in map(file.get, keys) if isinstance(number, int)]
    kinds = file.get("tokenizer.ggml.token_type")
    if isinstance(kinds, list):
        pairs = enumerate(zip(_tokens(file), kinds, strict=False))
        named += [number for number, (token, kind) in pairs if kind == CONTROL and token in ENDS]
    return {"eos_token_id": [*dict.fromkeys(named)]}


def _tokens(file: Metadata) -> list[str]:
    tokens = file.get(TOKENS)
    return tokens if isinstance(tokens, list) else []


def _head_dims(file: Metadata) -> tuple[int, int]:
    """Returns the elements of a head, and how many of them rope rotates."""
    width, num_heads = file.integer("embedding_length"), file.integer("attention.head_count")
    whole = file.integer("attention.key_length", width // num_heads)
    rotary = file.integer("rope.dimension_count", whole)
    return max(whole, rotary), rotary


def _rope_scaling(file: Metadata, family: GgufFamily) -> Settings | None:
    factor = file.number("rope.scaling.factor", 1.0)
    divisors = [_divisors(file, name) for name in ("rope_factors_short", "rope_factors_long")]
    if all(divisors):
        short, long = divisors
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if (found := _divisors(file, "rope_freqs")) is not None:  # Llama 3.1
        return {
            "rope_type": "longrope",
            "short_factor": found,
            "long_factor": found,
            "attention_factor": 1.0,
        }
    kind = file.get(f"{file.architecture}.rope.scaling.type")
    if kind in (None, "none") or factor == 1.0:
        return None
    trained_len = file.integer("rope.scaling.original_context_length", 0)
    scaling: Settings = {"rope_type": kind, "factor": factor, **family.rope(file)}
    scaling |= {
        own: file.number(f"rope.scaling.{name}")
        for name, own in YARN.items()
        if file.has(f"rope.scaling.{name}")
    }
    return scaling | ({"original_max_position_embeddings": trained_len} if trained_len else {})


def _divisors(file: Metadata, name: str) -> list[float] | None:
    """Returns the values by which a tensor of the file divides the frequencies of rope."""
    stored = file.tensors.get(f"{name}.weight")
    if stored is None:
        return None
    count = stored.size // np.dtype(np.float32).itemsize
    values = np.fromfile(file.paths[stored.file], np.float32, count=count, offset=stored.at)
    return [float(value) for value in values]


def _norm_eps(file: Metadata) -> float:
    name = "attention.layer_norm_epsilon"
    return file.number(name if file.has(name) else "attention.layer_norm_rms_epsilon")
