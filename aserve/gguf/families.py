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

# The names of modules in a layer, or around the layers, by those of GGUF. `{}` is the number of an
# expert: the file has the tensors of all experts as one.
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
GATED_SHARED: Mapping[str, str] = {  # an MLP that all tokens share beside the experts
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_EXPERTS: Mapping[str, str] = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
CORRECTED_EXPERTS: Mapping[str, str] = {
    **EXPERTS,
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **SHARED_EXPERTS,
}
BIASED_EXPERTS: Mapping[str, str] = {
    **EXPERTS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
LATENTS: Mapping[str, str] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # of older files, in place of the next two
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
INDEXER: Mapping[str, str] = {
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
GLM4: Mapping[str, str] = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
MIXTRAL: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
CORRECTED_MIXTRAL: Mapping[str, str] = {
    **MIXTRAL,
    "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
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
SHORT_CONV_EXPERTS: Mapping[str, str] = {
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
DELTA: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
}
MAMBA: Mapping[str, str] = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
SHARED_ALONE: Mapping[str, str] = {  # layers without experts
    "ffn_gate": "mlp.shared_experts.gate_proj",
    "ffn_up": "mlp.shared_experts.up_proj",
    "ffn_down": "mlp.shared_experts.down_proj",
}
Settings = dict[str, object]
QUERY_SCALE = "attention.temperature_scale"
SIGMOID = 2  # gguf.ExpertGatingFuncType


class RowOrder(msgspec.Struct, frozen=True):
    """Rows from number `first` on are [outer, left, right, inner] in the file, and
    [outer, right, left, inner] in the model."""

    outer: int
    left: int
    right: int
    inner: int
    first: int = 0


OrderOf = Callable[[Metadata, str, int], RowOrder | None]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family has the names of modules in a layer, and of those `around` the layers, by those of
    GGUF. `order_of` returns the order in which the file has the rows of a module, of which there
    are so many, or None for that of the model.
    """

    architecture: str  # in config.json
    model_type: str
    settings: Callable[[Metadata], Settings]  # beside those that all families have
    names: Mapping[str, str] = field(default_factory=lambda: LAYER)
    around: Mapping[str, str] = field(default_factory=lambda: AROUND)
    norm_offset: float = 0.0  # that the file's norms have beside the model's
    # What stands beside the scaling of rope that all families have.
    rope: Callable[[Metadata], Settings] = lambda _file: {}
    order_of: OrderOf = lambda _file, _module, _rows: None


def _nothing(_file: Metadata) -> Settings:
    return {}


def _experts(file: Metadata) -> Settings:
    return {
        "num_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _olmoe(file: Metadata) -> Settings:
    return {
        "num_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
        "norm_topk_prob": False,
    }


def _qwen2_moe(file: Metadata) -> Settings:
    return {
        **_experts(file),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": file.rows_in_layers("ffn_gate_shexp.weight"),
    }


def _corrected_experts(file: Metadata) -> Settings:
    """Experts as those of DeepSeek-V3."""
    return {
        "n_routed_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
        "n_group": file.integer("expert_group_count", 1),
        "topk_group": file.integer("expert_group_used_count", 1),
        "norm_topk_prob": file.flag("expert_weights_norm", default=True),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
    }


def _deepseek2(file: Metadata) -> Settings:
    """The names of newer files end in `mla`, as they have the sizes of one head of latents, too."""
    rope_dim, num_heads = (
        file.integer(name) for name in ("rope.dimension_count", "attention.head_count")
    )
    key_dim, value_dim = (
        file.integer(f"attention.{name}_mla", file.integer(f"attention.{name}"))
        for name in ("key_length", "value_length")
    )
    corrects = file.is_in_layers("exp_probs_b.bias")
    is_sigmoid = corrects or file.integer("expert_gating_func", 0) == SIGMOID
    groups = file.integer("expert_group_count", 1)
    own: Settings = {
        **_corrected_experts(file),
        "norm_topk_prob": file.flag("expert_weights_norm"),
        "n_shared_experts": file.integer("expert_shared_count", 0),
        "first_k_dense_replace": file.integer("leading_dense_block_count", 0),
        "head_dim": rope_dim,
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": num_heads,
        "has_joined_up": file.is_in_layers("attn_kv_b.weight"),
        "kv_lora_rank": file.integer("attention.kv_lora_rank"),
        "q_lora_rank": file.integer("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_dim,
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
    }
    v3 = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return own | (v3 if is_sigmoid else {})


def _deepseek32(file: Metadata) -> Settings:
    return {
        **_deepseek2(file),
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": file.integer("attention.indexer.head_count"),
        "index_head_dim": file.integer("attention.indexer.key_length"),
        "index_topk": file.integer("attention.indexer.top_k"),
    }


def _latent_rope(file: Metadata) -> Settings:
    """The file has a tenth of a factor that checkpoints name twice. Of Ministral 3 it has the whole
    factor, which changes nothing, because only the ratio of the two counts there. It has 0 for
    none."""
    name = "rope.scaling.yarn_log_multiplier"
    if not file.number(name, 0.0):
        return {}
    factor = 10 * file.number(name)
    return {"mscale": factor, "mscale_all_dim": factor}


def _glm4_moe(file: Metadata) -> Settings:
    return {
        **_corrected_experts(file),
        "n_shared_experts": file.integer("expert_shared_count"),
        "first_k_dense_replace": file.integer("leading_dense_block_count", 0),
        "use_qk_norm": file.is_in_layers("attn_q_norm.weight"),
    }


def _dots1(file: Metadata) -> Settings:
    return {**_glm4_moe(file), "sliding_window": None}


def _ernie(file: Metadata) -> Settings:
    return {"use_bias": file.is_in_layers("attn_q.bias")}


def _ernie_moe(file: Metadata) -> Settings:
    return {
        **_ernie(file),
        "moe_num_experts": file.integer("expert_count"),
        "moe_k": file.integer("expert_used_count"),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": file.integer("expert_shared_count", 0),
        "moe_layer_interval": file.integer("interleave_moe_layer_step", 1),
        "moe_layer_start_index": file.integer("leading_dense_block_count", 0),
    }


def _gpt_oss(file: Metadata) -> Settings:
    return {
        **_mixtral(file),
        "has_joined_biases": False,
        "sliding_window": file.integer("attention.sliding_window"),
    }


def _mixtral(file: Metadata) -> Settings:
    return {
        "num_local_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
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


def _windows(file: Metadata) -> Settings:
    """The window of the layers that the file lists, or of three of four."""
    window, name = file.integer("attention.sliding_window", 0), "attention.sliding_window_pattern"
    has_window = [bool(window) and (layer + 1) % 4 != 0 for layer in range(file.num_layers)]
    if window and file.has(name):
        has_window = [bool(each) for each in file.integers(name)]
    return {
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if each else "full_attention"
            for each in has_window[: file.num_layers]
        ],
    }


def _seed_oss(file: Metadata) -> Settings:
    return {"attention_out_bias": file.is_in_layers("attn_output.bias")}


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
        "layer_types": ["full_attention" if heads else "conv" for heads in by_layer],
        "norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": file.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(file: Metadata) -> Settings:
    return {
        **_lfm2(file),
        **_experts(file),
        "num_dense_layers": file.integer("leading_dense_block_count", 0),
        "use_expert_bias": file.is_in_layers("exp_probs_b.bias"),
    }


def _kinds(file: Metadata, modules: Mapping[str, str], *, others: str) -> list[str]:
    """Returns the kind of each layer, by a module that layers of this kind alone have."""
    return [
        next(
            (
                kind
                for module, kind in modules.items()
                if f"blk.{layer}.{module}.weight" in file.tensors
            ),
            others,
        )
        for layer in range(file.num_layers)
    ]


def _mamba(file: Metadata) -> Settings:
    num_heads, size = file.integer("ssm.time_step_rank"), file.integer("ssm.inner_size")
    return {
        "mamba_d_conv": file.integer("ssm.conv_kernel"),
        "mamba_d_head": size // num_heads,
        "mamba_d_state": file.integer("ssm.state_size"),
        "mamba_expand": size // file.integer("embedding_length"),
        "mamba_n_groups": file.integer("ssm.group_count"),
        "mamba_n_heads": num_heads,
        "mamba_conv_bias": file.is_in_layers("ssm_conv1d.bias"),
        "mamba_proj_bias": file.is_in_layers("ssm_in.bias"),
    }


def _granite_moe(file: Metadata) -> Settings:
    """Granite 4 without Mamba-2 is such a file, too."""
    return {
        **_granite(file),
        **_mixtral(file),
        "has_joined_shared": False,
        "shared_intermediate_size": file.integer("expert_shared_feed_forward_length", 0),
    }


def _granite_hybrid(file: Metadata) -> Settings:
    return {
        **_granite(file),
        **_mamba(file),
        "has_joined_shared": False,
        "layer_types": _kinds(file, {"attn_q": "attention"}, others="mamba"),
        "num_local_experts": file.integer("expert_count", 0),
        "num_experts_per_tok": file.integer("expert_used_count", 0) or None,
        "shared_intermediate_size": file.integer("expert_shared_feed_forward_length"),
        "position_embedding_type": "rope" if file.flag("rope.scaling.finetuned") else "nope",
    }


def _nemotron_h(file: Metadata) -> Settings:
    mamba = _mamba(file)
    modules = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe"}
    settings: Settings = {
        "intermediate_size": file.rows_in_layers("ffn_up.weight"),
        "conv_kernel": mamba["mamba_d_conv"],
        "layers_block_type": _kinds(file, modules, others="mlp"),
        "layer_norm_epsilon": file.number("attention.layer_norm_epsilon"),
        "mamba_head_dim": mamba["mamba_d_head"],
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mlp_bias": file.is_in_layers("ffn_up.bias"),
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "partial_rotary_factor": None,  # no positions at all
        "use_bias": mamba["mamba_proj_bias"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "moe_latent_size": file.integer("moe_latent_size", 0) or None,
    }
    if not file.integer("expert_count", 0):
        return settings
    shared_size = file.integer("expert_shared_feed_forward_length")
    return (
        settings | _corrected_experts(file) | {"moe_shared_expert_intermediate_size": shared_size}
    )


def _falcon_h1(file: Metadata) -> Settings:
    """Weights have the model's factors in them."""
    return {
        **_mamba(file),
        "mamba_d_ssm": file.integer("ssm.inner_size"),
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": file.is_in_layers("ssm_norm.weight"),
        "mlp_bias": file.is_in_layers("ffn_up.bias"),
        "projectors_bias": file.is_in_layers("ssm_out.bias"),
    }


def _qwen35(file: Metadata) -> Settings:
    num_values = file.integer("ssm.time_step_rank")
    interval = file.integer("full_attention_interval")
    is_linear = [(layer + 1) % interval != 0 for layer in range(file.num_layers)]
    if file.has("attention.recurrent_layers"):
        is_linear = [bool(each) for each in file.integers("attention.recurrent_layers")]
    return {
        "layer_types": [
            "linear_attention" if each else "full_attention"
            for each in is_linear[: file.num_layers]
        ],
        "linear_conv_kernel_dim": file.integer("ssm.conv_kernel"),
        "linear_key_head_dim": file.integer("ssm.state_size"),
        "linear_num_key_heads": file.integer("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_value_head_dim": file.integer("ssm.inner_size") // num_values,
    }


def _qwen35_moe(file: Metadata) -> Settings:
    return {**_qwen35(file), **_qwen2_moe(file), "norm_topk_prob": True}


def _qwen3_next(file: Metadata) -> Settings:
    return {**_qwen35_moe(file), "has_grouped_projections": False}


def _mistral3(file: Metadata) -> Settings:
    if not file.has(QUERY_SCALE):
        return {}
    return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}


def _mistral3_rope(file: Metadata) -> Settings:
    beta = {"llama_4_scaling_beta": file.number(QUERY_SCALE)} if file.has(QUERY_SCALE) else {}
    return {**_latent_rope(file), **beta}


def _neighbours(file: Metadata, module: str, rows: int) -> RowOrder | None:
    """Rope rotates neighbouring elements of a head in the file, and those half a head apart in the
    model."""
    num_heads = file.integer("attention.head_count")
    if module == "attn_k" and file.has("attention.head_count_kv"):
        num_heads = file.integer("attention.head_count_kv")
    elif module not in ("attn_q", "attn_k"):
        return None
    return RowOrder(num_heads, rows // num_heads // 2, 2, 1)


def _by_kinds(file: Metadata, module: str, rows: int) -> RowOrder | None:
    """The file has the rows of b and of a that belong to one key head together."""
    if module != "ssm_ba":
        return None
    num_keys = file.integer("ssm.group_count")
    return RowOrder(1, num_keys, 2, rows // 2 // num_keys)


def _tiled(file: Metadata, module: str, _rows: int) -> RowOrder | None:
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


NEMOTRON_H = GgufFamily(
    *("NemotronHForCausalLM", "nemotron_h", _nemotron_h),
    {**LAYER, **MAMBA, **CORRECTED_EXPERTS, "attn_norm": "norm"},
)
QWEN3 = GgufFamily("Qwen3ForCausalLM", "qwen3", _nothing)
QWEN3_MOE = GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", _experts, {**LAYER, **EXPERTS})
FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "deepseek2": GgufFamily(
            *("DeepseekV2ForCausalLM", "deepseek_v2", _deepseek2),
            {**LAYER, **LATENTS, **CORRECTED_EXPERTS},
            rope=_latent_rope,
        ),
        "deepseek32": GgufFamily(
            *("DeepseekV32ForCausalLM", "deepseek_v32", _deepseek32),
            {**LAYER, **LATENTS, **INDEXER, **CORRECTED_EXPERTS},
            rope=_latent_rope,
        ),
        "dots1": GgufFamily("Dots1ForCausalLM", "dots1", _dots1, {**LAYER, **CORRECTED_EXPERTS}),
        "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", "ernie4_5", _ernie),
        "ernie4_5-moe": GgufFamily(
            *("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ernie_moe),
            {
                **LAYER,
                **CORRECTED_EXPERTS,
                "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
            },
        ),
        "exaone4": GgufFamily(
            *("Exaone4ForCausalLM", "exaone4", _windows, {**LAYER, **NORMS_AROUND})
        ),
        "falcon-h1": GgufFamily("FalconH1ForCausalLM", "falcon_h1", _falcon_h1, {**LAYER, **MAMBA}),
        "gemma": GgufFamily("GemmaForCausalLM", "gemma", _nothing, norm_offset=1.0),
        "gemma2": GgufFamily(
            *("Gemma2ForCausalLM", "gemma2", _gemma2, {**LAYER, **NORMS_AROUND}), norm_offset=1.0
        ),
        "gemma3": GgufFamily(
            *("Gemma3ForCausalLM", "gemma3_text", _gemma3, {**LAYER, **NORMS_AROUND}),
            norm_offset=1.0,
        ),
        "glm4": GgufFamily("Glm4ForCausalLM", "glm4", _nothing, {**LAYER, **GLM4}),
        "glm4moe": GgufFamily(
            "Glm4MoeForCausalLM", "glm4_moe", _glm4_moe, {**LAYER, **CORRECTED_EXPERTS}
        ),
        "gpt-oss": GgufFamily(
            *("GptOssForCausalLM", "gpt_oss", _gpt_oss, {**LAYER, **BIASED_EXPERTS}),
            rope=lambda _file: {"truncate": False},
        ),
        "granite": GgufFamily("GraniteForCausalLM", "granite", _granite, order_of=_neighbours),
        "granitehybrid": GgufFamily(
            *("GraniteMoeHybridForCausalLM", "granitemoehybrid", _granite_hybrid),
            {**LAYER, **MAMBA, **EXPERTS, **SHARED_ALONE, **SHARED_EXPERTS},
            order_of=_neighbours,
        ),
        "granitemoe": GgufFamily(
            *("GraniteMoeForCausalLM", "granitemoe", _granite_moe),
            {**LAYER, **EXPERTS, **SHARED_EXPERTS},
            order_of=_neighbours,
        ),
        "lfm2": GgufFamily(
            *("Lfm2ForCausalLM", "lfm2", _lfm2, {**LAYER, **SHORT_CONV}),
            {**AROUND, "token_embd_norm": "model.embedding_norm"},
        ),
        "lfm2moe": GgufFamily(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            _lfm2_moe,
            {**LAYER, **SHORT_CONV, **SHORT_CONV_EXPERTS},
            {**AROUND, "token_embd_norm": "model.embedding_norm"},
        ),
        "llama": GgufFamily("LlamaForCausalLM", "llama", _nothing, order_of=_neighbours),
        "minimax-m2": GgufFamily(
            "MiniMaxM2ForCausalLM", "minimax_m2", _mixtral, {**LAYER, **CORRECTED_MIXTRAL}
        ),
        "mistral3": GgufFamily(
            *("LlamaForCausalLM", "llama", _mistral3),
            rope=_mistral3_rope,
            order_of=_neighbours,
        ),
        "nemotron_h": NEMOTRON_H,
        "nemotron_h_moe": NEMOTRON_H,
        # OLMo 3, whose layers may all be without a window, as those of OLMo 2 are.
        "olmo2": GgufFamily("Olmo3ForCausalLM", "olmo3", _windows, {**LAYER, **NORMS_AROUND}),
        "olmoe": GgufFamily("OlmoeForCausalLM", "olmoe", _olmoe, {**LAYER, **EXPERTS}),
        "phi3": GgufFamily(
            *("Phi3ForCausalLM", "phi3", _phi3),
            {**LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ),
        "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", _nothing),
        "qwen2moe": GgufFamily(
            *("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe), {**LAYER, **EXPERTS, **GATED_SHARED}
        ),
        "qwen2vl": GgufFamily("Qwen2ForCausalLM", "qwen2", _nothing),
        "qwen3": QWEN3,
        "qwen35": GgufFamily(
            *("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen35, {**LAYER, **DELTA}),
            norm_offset=1.0,
            order_of=_tiled,
        ),
        "qwen35moe": GgufFamily(
            *("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen35_moe),
            {**LAYER, **DELTA, **EXPERTS, **GATED_SHARED},
            norm_offset=1.0,
            order_of=_tiled,
        ),
        "qwen3moe": QWEN3_MOE,
        "qwen3next": GgufFamily(
            *("Qwen3NextForCausalLM", "qwen3_next", _qwen3_next),
            {**LAYER, **DELTA, **EXPERTS, **GATED_SHARED},
            norm_offset=1.0,
            order_of=_by_kinds,
        ),
        "qwen3vl": QWEN3,
        "qwen3vlmoe": QWEN3_MOE,
        "seed_oss": GgufFamily(
            *("SeedOssForCausalLM", "seed_oss", _seed_oss),
            {**LAYER, "post_attention_norm": "post_attention_layernorm"},
        ),
        "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", _nothing, order_of=_neighbours),
    }
)

# Those that have experts of an architecture which others have without them.
WITH_EXPERTS: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily(
            *("MixtralForCausalLM", "mixtral", _mixtral, {**LAYER, **MIXTRAL}),
            order_of=_neighbours,
        )
    }
)
