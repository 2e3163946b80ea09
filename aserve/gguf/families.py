"""The families of models that are read from GGUF. They differ in their configuration, which gets
the names of Hugging Face, and in the names and the order of their tensors.

Source: convert_hf_to_gguf.py of llama.cpp, whose changes of names and values are undone here
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from aserve.gguf.metadata import Metadata

LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AROUND: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
NORMS_AROUND: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHORT_CONV: Mapping[str, str] = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
DELTA: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
}
Settings = dict[str, object]


class RowOrder(msgspec.Struct, frozen=True):
    """Rows from number `first` on are [outer, left, right, inner] in the file, and
    [outer, right, left, inner] in the model."""

    outer: int
    left: int
    right: int
    inner: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family has the names of modules in a layer, and of those `around` the layers, by those of
    GGUF. `order_of` returns the order in which the file has the rows of a module, or None for that
    of the model.
    """

    architecture: str  # in config.json
    model_type: str
    settings: Callable[[Metadata], Settings]  # beside those that all families have
    names: Mapping[str, str] = field(default_factory=lambda: LAYER)
    around: Mapping[str, str] = field(default_factory=lambda: AROUND)
    norm_offset: float = 0.0  # that the file's norms have beside the model's
    order_of: Callable[[Metadata, str], RowOrder | None] = lambda _file, _module: None


def _nothing(_file: Metadata) -> Settings:
    return {}


def _qwen3_moe(file: Metadata) -> Settings:
    return {
        "num_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(file: Metadata, *, largest: int) -> Settings:
    """The model with the `largest` number of layers scales attention by its width."""
    num_heads = file.integer("attention.head_count")
    by_width = file.integer("embedding_length") // num_heads
    is_largest = file.integer("block_count") == largest
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": by_width if is_largest else file.integer("attention.key_length"),
        "sliding_window": file.integer("attention.sliding_window"),
    }


def _gemma2(file: Metadata) -> Settings:
    return {
        **_gemma(file, largest=46),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
    }


def _gemma3(file: Metadata) -> Settings:
    return {
        **_gemma(file, largest=62),
        "rope_local_base_freq": file.number("rope.freq_base_swa", 10_000.0),
        "sliding_window_pattern": 6,  # a layer with full attention behind five with the window
    }


def _phi3(file: Metadata) -> Settings:
    window = file.integer("attention.sliding_window", 0)
    return {
        "sliding_window": window or None,
        "original_max_position_embeddings": file.integer(
            "rope.scaling.original_context_length", file.integer("context_length")
        ),
    }


def _granite(file: Metadata) -> Settings:
    return {
        "attention_multiplier": file.number("attention.scale"),
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
    }


def _lfm2(file: Metadata) -> Settings:
    by_layer = file.integers("attention.head_count_kv")
    return {
        "num_key_value_heads": max(by_layer),
        "layer_types": ["full_attention" if heads else "conv" for heads in by_layer],
        "norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": file.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _qwen35(file: Metadata) -> Settings:
    num_values = file.integer("ssm.time_step_rank")
    return {
        "full_attention_interval": file.integer("full_attention_interval"),
        "num_hidden_layers": file.integer("block_count") - file.integer("nextn_predict_layers", 0),
        "linear_conv_kernel_dim": file.integer("ssm.conv_kernel"),
        "linear_key_head_dim": file.integer("ssm.state_size"),
        "linear_num_key_heads": file.integer("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_value_head_dim": file.integer("ssm.inner_size") // num_values,
    }


def _neighbours(file: Metadata, module: str) -> RowOrder | None:
    """Rope rotates neighbouring elements of a head in the file, and those half a head apart in the
    model."""
    num_heads = file.integer("attention.head_count")
    if module == "attn_k":
        num_heads = file.integer("attention.head_count_kv", num_heads)
    elif module != "attn_q":
        return None
    rows = file.tensors[f"blk.0.{module}.weight"].shape[0]
    return RowOrder(num_heads, rows // num_heads // 2, 2, 1)


def _tiled(file: Metadata, module: str) -> RowOrder | None:
    """The file has the first value head of each key head, then their second ones, and so on."""
    num_keys, num_values = file.integer("ssm.group_count"), file.integer("ssm.time_step_rank")
    first, head_dim = 0, file.integer("ssm.inner_size") // num_values
    if module in ("attn_qkv", "ssm_conv1d"):
        first = 2 * num_keys * file.integer("ssm.state_size")
    elif module in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        head_dim = 1
    elif module not in ("attn_gate", "ssm_out"):
        return None
    return RowOrder(1, num_values // num_keys, num_keys, head_dim, first)


FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "gemma2": GgufFamily(
            *("Gemma2ForCausalLM", "gemma2", _gemma2, {**LAYER, **NORMS_AROUND}), norm_offset=1.0
        ),
        "gemma3": GgufFamily(
            *("Gemma3ForCausalLM", "gemma3_text", _gemma3, {**LAYER, **NORMS_AROUND}),
            norm_offset=1.0,
        ),
        "granite": GgufFamily("GraniteForCausalLM", "granite", _granite, order_of=_neighbours),
        "lfm2": GgufFamily(
            *("Lfm2ForCausalLM", "lfm2", _lfm2, {**LAYER, **SHORT_CONV}),
            {**AROUND, "token_embd_norm": "model.embedding_norm"},
        ),
        "llama": GgufFamily("LlamaForCausalLM", "llama", _nothing, order_of=_neighbours),
        "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", _nothing, {**LAYER, **NORMS_AROUND}),
        "phi3": GgufFamily(
            *("Phi3ForCausalLM", "phi3", _phi3),
            {**LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ),
        "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", _nothing),
        "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", _nothing),
        "qwen35": GgufFamily(
            *("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen35, {**LAYER, **DELTA}),
            norm_offset=1.0,
            order_of=_tiled,
        ),
        "qwen3moe": GgufFamily(
            "Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe, {**LAYER, **EXPERTS}
        ),
    }
)
