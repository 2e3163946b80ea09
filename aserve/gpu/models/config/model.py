"""Reads and validates a model's config.json.

The fields here are those that the families share, in the spellings of older and newer versions of
transformers. Fields of a single family are read in its own file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aserve.errors import ConfigError
from aserve.gpu.layers.mlp import ACTIVATIONS
from aserve.gpu.layers.rope_scaling import Rope
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import FULL, SLIDING
from aserve.gpu.models.config.quantization import quantization_of
from aserve.gpu.models.config.rope import longest_context, parse_rope, rotary_part
from aserve.json_file import read_json_object
from aserve.messages.base import MAX_INT32

# Other names of fields, by those that are read here (LongCat's and ModernBERT's configurations have
# them).
OTHER_NAMES = {
    "rope_theta": "global_rope_theta",
    "rope_local_base_freq": "local_rope_theta",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
}
LAYER_KINDS = "layers_block_type"  # the kind of each layer, in Nemotron-H's configurations
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # leading elements of a head that rope rotates
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    rope: Rope
    sliding_rope: Rope  # rope of layers with a sliding window
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str | None  # of the checkpoint, where the config names one
    fields: Fields = field(compare=False, repr=False)  # the whole file, for a family's own fields

    def context_len(self, asked: int | None) -> int:
        """Returns the engine's max_model_len. `asked` is the user's option; it must not exceed the
        longest context of the rotary positions.
        """
        if asked is None:
            return self.max_position_embeddings
        longest = longest_context(self.rope, self.max_position_embeddings)
        if not 1 <= asked <= longest:
            raise ConfigError(
                f"max_model_len is {asked}, but this model has positions for 1 to {longest} tokens"
            )
        return asked


def read_fields(model_dir: Path) -> Fields:
    path = model_dir / "config.json"
    try:
        values = read_json_object(path)
    except FileNotFoundError:
        raise ConfigError(f"{model_dir} is not a model directory: it has no config.json") from None
    return Fields(values, source=str(path))


def architecture_of(fields: Fields) -> str:
    architectures = fields.texts("architectures")
    if len(architectures) != 1:
        fields.refuse("architectures", expected="a list of one name")
    return architectures[0]


def parse_config(file: Fields, *, defaults: Mapping[str, object]) -> ModelConfig:
    """`defaults` are the family's values for absent fields."""
    fields = file.merged_with("text_config").over(defaults, other_names=OTHER_NAMES)
    _refuse_unsupported(fields)
    num_heads = fields.integer("num_attention_heads")
    head_dim = _head_dim(fields, num_heads)
    rotary_dim = _rotary_dim(fields, head_dim)
    max_position_embeddings = fields.integer("max_position_embeddings")

    def rope_of(kind: str) -> Rope:
        return parse_rope(
            fields, kind, rotary_dim=rotary_dim, max_position_embeddings=max_position_embeddings
        )

    return ModelConfig(
        architecture=architecture_of(file),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=_num_layers(fields),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        activation=_activation(fields),
        rope=rope_of(FULL),
        sliding_rope=rope_of(SLIDING),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        dtype=_dtype(fields),
        fields=fields,
    )


def _refuse_unsupported(fields: Fields) -> None:
    quantization_of(fields)
    if fields.flag("use_bidirectional_attention"):
        fields.refuse("use_bidirectional_attention", expected="false: attention is causal")


def _activation(fields: Fields) -> str:
    name = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    activation = fields.text(name, default="silu")
    if activation not in ACTIVATIONS:
        fields.refuse(name, expected=" or ".join(ACTIVATIONS))
    return activation


def _head_dim(fields: Fields, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if not fields.has("head_dim") and hidden_size % num_heads:
        fields.refuse("num_attention_heads", expected=f"a divisor of hidden_size, {hidden_size}")
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    if head_dim < 4 or head_dim % 2:
        fields.refuse("head_dim", expected=f"an even number of at least 4, not {head_dim}")
    if head_dim * num_heads > MAX_INT32:
        fields.refuse("num_attention_heads", expected=f"fewer heads of {head_dim} elements")
    return head_dim


def _rotary_dim(fields: Fields, head_dim: int) -> int:
    rotary_dim = fields.integer("rotary_dim", default=int(head_dim * rotary_part(fields)))
    if rotary_dim > head_dim:
        fields.refuse("rotary_dim", expected=f"at most {head_dim}, the elements of a head")
    if rotary_dim < 4 or rotary_dim % 2:
        raise ConfigError(
            f"{fields.source}: partial_rotary_factor rotates {rotary_dim} of {head_dim} "
            "elements of a head; expected an even number of at least 4"
        )
    return rotary_dim


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", expected=f"a divisor of {num_heads} attention heads")
    return num_kv_heads


def _num_layers(fields: Fields) -> int:
    """Returns the number of layers, which some configurations only list."""
    if fields.has(LAYER_KINDS) and not fields.has("num_hidden_layers"):
        return len(fields.texts(LAYER_KINDS))
    return fields.integer("num_hidden_layers")


def _dtype(fields: Fields) -> str | None:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(name):
        return None
    dtype = fields.text(name).removeprefix("torch.")
    if dtype not in DTYPES:
        fields.refuse(name, expected=" or ".join(DTYPES))
    return dtype
