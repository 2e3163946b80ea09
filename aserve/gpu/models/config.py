"""A model's configuration, read from config.json and validated.

It knows the names that the families share, in both dialects; what one family makes of them is in
its own file. It reads no weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from aserve.errors import ConfigError
from aserve.gpu.layers.rope import Rope
from aserve.gpu.models.fields import Fields
from aserve.gpu.models.rope_fields import longest_context, parse_rope

DTYPES = ("float32", "float64", "bfloat16", "float16")


class ModelConfig(msgspec.Struct, frozen=True):
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]  # per layer, as the file has them; a family may not have any
    dtype: str | None  # the checkpoint's, if it says so

    def context_len(self, asked: int | None) -> int:
        """The engine's max_model_len: what was asked for, if the positions reach that far."""
        if asked is None:
            return self.max_position_embeddings
        longest = longest_context(self.rope, self.max_position_embeddings)
        if not 1 <= asked <= longest:
            raise ConfigError(
                f"max_model_len is {asked}, but this model has positions for 1 to {longest} tokens"
            )
        return asked


def read_config(model_dir: Path) -> ModelConfig:
    path = model_dir / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{model_dir} is not a model directory: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return parse_config(values, source=str(path))


def parse_config(values: dict[str, object], *, source: str) -> ModelConfig:
    outer = Fields(values, source=source)
    architectures = outer.texts("architectures")
    if len(architectures) != 1:
        outer.refuse("architectures", expected="a list of one name")
    fields = outer.merged_with("text_config")
    _refuse_unsupported(fields)
    num_heads = fields.integer("num_attention_heads")
    head_dim = _head_dim(fields, num_heads)
    max_position_embeddings = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers")
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=parse_rope(fields, head_dim=head_dim, max_position_embeddings=max_position_embeddings),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        windows=_windows(fields, num_layers),
        dtype=_dtype(fields),
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", default="silu") != "silu":
        fields.refuse("hidden_act", expected="silu")
    if fields.has("quantization_config"):
        fields.refuse("quantization_config", expected="none: quantized checkpoints are unsupported")


def _head_dim(fields: Fields, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if not fields.has("head_dim") and hidden_size % num_heads:
        fields.refuse("num_attention_heads", expected=f"a divisor of hidden_size, {hidden_size}")
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    if head_dim < 4 or head_dim % 2:
        fields.refuse("head_dim", expected=f"an even number of at least 4, not {head_dim}")
    return head_dim


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", expected=f"a divisor of {num_heads} attention heads")
    return num_kv_heads


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """`layer_types` says which layers slide; without it those from `max_window_layers` on do."""
    if not fields.flag("use_sliding_window"):
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    if not fields.has("layer_types"):
        num_full = fields.integer("max_window_layers", minimum=0)
        return tuple(None if index < num_full else window for index in range(num_layers))
    kinds = fields.texts("layer_types", length=num_layers)
    if not {*kinds} <= {"full_attention", "sliding_attention"}:
        fields.refuse("layer_types", expected="full_attention or sliding_attention for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(fields: Fields) -> str | None:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(name):
        return None
    dtype = fields.text(name).removeprefix("torch.")
    if dtype not in DTYPES:
        fields.refuse(name, expected=" or ".join(DTYPES))
    return dtype
