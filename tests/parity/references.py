"""Tiny random models of transformers that a wrong engine cannot agree with by chance.

Fresh random weights are nearly blind: whatever the history, the next token is much the same. So the
layers' weights are scaled until 64 greedy tokens hold at least 20 distinct ones. Prompts exceed the
length that the rotary positions were "trained" on, where stretching matters. Written once per kind
and session, never changed by tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PROMPT_LEN = 70
NUM_GREEDY = 64
MAX_MODEL_LEN = 144
TRAINED_LEN = 32  # of the rotary positions
MIN_DISTINCT = 20

VOCAB_SIZE = 160

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
ROPE_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 6.0}}
SWITCHED = {"use_sliding_window": True, "sliding_window": 24}
MIXED = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
SLOWER = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0]
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": SLOWER}
STRETCHED = {"original_max_position_embeddings": TRAINED_LEN}

GEMMA2 = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "attn_logit_softcapping": 10.0,
    "final_logit_softcapping": 5.0,
}
UNCAPPED = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": False,
}
GEMMA3 = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
}
PHI3 = {"hidden_size": 64, "pad_token_id": 0}
PARTIAL_LONG = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 6,
    "long_factor": SLOWER[:6],
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
}

DEEPSEEK = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
}
SPARSE = {"index_n_heads": 24, "index_head_dim": 12, "index_topk": 20}
GROUPED = {"topk_method": "group_limited_greedy", "first_k_dense_replace": 0}
YARN_MSCALE = {"rope_type": "yarn", "factor": 4.5, "mscale": 1.0, "mscale_all_dim": 0.8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM4_MOE = {
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}

DOTS1 = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
}
MINIMAX = {
    "num_experts_per_tok": 3,
    "num_local_experts": 8,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
}
ERNIE_MOE = {
    "moe_intermediate_size": 32,
    "moe_k": 3,
    "moe_num_experts": 8,
}
MINISTRAL3 = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.5,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
        **STRETCHED,
    }
}
GPT_OSS = {
    "attention_bias": True,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"rope_type": "yarn", "factor": 4.5, "truncate": False, **STRETCHED},
}

LONGCAT: dict[str, Any] = {
    **{name: DEEPSEEK[name] for name in ("kv_lora_rank", "q_lora_rank", "v_head_dim", "head_dim")},
    **{name: DEEPSEEK[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim")},
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "ffn_hidden_size": 80,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 6,
    "zero_expert_num": 3,
    "moe_topk": 4,
    "routed_scaling_factor": 1.5,
}

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.05,  # wider weights would multiply what float32 rounds, here and there
}
# Heads of which the CPU's kernels take blocks of columns.
BLOCKS = {**HYBRID, "linear_value_head_dim": 32}
THREE_AXES = {"rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}

CONVS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "tie_word_embeddings": True,
}

MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
}
GRANITE_HYBRID: dict[str, Any] = {
    **GRANITE,
    **MAMBA,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 40,
}
# Attention of which one token more or less changes what is said.
SHARP = {"attention_multiplier": 1.0}
# Heads of which the CPU's kernels take blocks of columns, and one group of them.
WIDE_HEADS = {"mamba_n_heads": 3, "mamba_d_head": 32, "mamba_n_groups": 1}

FALCON_H1: dict[str, Any] = {
    **MAMBA,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.2,
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.7,
    "lm_head_multiplier": 1.5,
    "mlp_multipliers": [0.8, 1.1],
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.6, 1.4, 1.2, 0.7, 1.1],
    "ssm_out_multiplier": 0.8,
}
NEMOTRON_H: dict[str, Any] = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 32,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}

# What differs from BASE: (architecture, its fields).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("Llama", {"max_position_embeddings": TRAINED_LEN, **ROPE_DYNAMIC}),
    "llama-yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.5, **STRETCHED}}),
    "llama-llama3": ("Llama", {"rope_parameters": {**LLAMA3, "factor": 8.0, **STRETCHED}}),
    "llama-longrope": ("Llama", {"rope_parameters": {**LONG, **STRETCHED}}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "deepseek2-lite": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek2": ("DeepseekV2", {**DEEPSEEK, **GROUPED}),
    "deepseek3": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": {**YARN_MSCALE, **STRETCHED}}),
    "deepseek3-halves": (
        "DeepseekV3",
        {**DEEPSEEK, "rope_interleave": False, "first_k_dense_replace": 3},
    ),
    "deepseek32": ("DeepseekV32", {**DEEPSEEK, **SPARSE}),
    "deepseek32-yarn": (
        "DeepseekV32",
        {**DEEPSEEK, **SPARSE, "rope_parameters": {**YARN_MSCALE, **STRETCHED}},
    ),
    "glm5": ("GlmMoeDsa", {**DEEPSEEK, **SPARSE, "indexer_types": ["full"] * 3}),
    "solar-open": (
        "SolarOpen",
        {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3},
    ),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral-full": ("Mistral", {"sliding_window": None, "rope_theta": 1e6}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2-uncapped": ("Gemma2", {**GEMMA2, **UNCAPPED, "attention_bias": True}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-linear": (
        "Gemma3",
        {
            **GEMMA3,
            **MIXED,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": ("Phi3", {**PHI3, "sliding_window": 24}),
    "phi3-partial": (
        "Phi3",
        {**PHI3, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": ("Phi3", {**PHI3, **STRETCHED, "rope_parameters": PARTIAL_LONG}),
    "glm4-moe": ("Glm4Moe", GLM4_MOE),
    "glm4-moe-groups": ("Glm4Moe", {**GLM4_MOE, "n_group": 4, "topk_group": 2}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "falcon-h1": ("FalconH1", FALCON_H1),
    "falcon-h1-norm": (
        "FalconH1",
        {
            **MAMBA,
            **WIDE_HEADS,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "projectors_bias": True,
        },
    ),
    "falcon-h1-late-norm": (
        "FalconH1",
        {
            **FALCON_H1,
            "key_multiplier": 2.0,  # attention of which one token more or less changes what is said
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "granite": ("Granite", GRANITE),
    "granite-biased": ("Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {**GRANITE_HYBRID, **WIDE_HEADS, **EXPERTS, **SHARP, "num_local_experts": 4},
    ),
    "granite-hybrid-attention": (
        "GraniteMoeHybrid",
        {**GRANITE_HYBRID, "num_local_experts": 0, "layer_types": ["attention"] * 3},
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {
            **GRANITE_HYBRID,
            **WIDE_HEADS,
            "layer_types": ["attention", "mamba", "attention"],
            "num_local_experts": 0,
            "mamba_proj_bias": True,
        },
    ),
    "granite-hybrid-rope": (
        "GraniteMoeHybrid",
        {
            **GRANITE_HYBRID,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            **WIDE_HEADS,
            **SHARP,
            "mamba_n_groups": 3,
            "mamba_conv_bias": False,
        },
    ),
    "granite-moe": ("GraniteMoe", {**GRANITE, **SHARP, "num_local_experts": 4}),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {**GRANITE, **SHARP, "num_local_experts": 4, "shared_intermediate_size": 40},
    ),
    "longcat-flash": ("LongcatFlash", LONGCAT),
    "mixtral": ("Mixtral", {"sliding_window": 24, "num_local_experts": 4}),
    "nemotron-h": ("NemotronH", {**NEMOTRON_H, "hybrid_override_pattern": "M-*EMM*-E"}),
    "nemotron-h-dense": (
        "NemotronH",
        {
            **NEMOTRON_H,
            "hybrid_override_pattern": "M*-*",
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-biased": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"sliding_window": 24, "num_hidden_layers": 4}),
    "olmo3-yarn": (
        "Olmo3",
        {**MIXED, "rope_scaling": {"rope_type": "yarn", "factor": 4.5, **STRETCHED}},
    ),
    "olmoe": ("Olmoe", {"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2}),
    "dots1": ("Dots1", DOTS1),
    "dots1-sliding": (
        "Dots1",
        {**DOTS1, "attention_bias": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "ernie4.5": ("Ernie4_5", {"use_bias": True}),
    "ernie4.5-moe": ("Ernie4_5_Moe", ERNIE_MOE),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-sliding": ("Exaone4", {"sliding_window": 24, "num_hidden_layers": 4}),
    "exaone4-mixed": ("Exaone4", MIXED),
    "glm": ("Glm", {"pad_token_id": 0}),
    "glm4": ("Glm4", {"pad_token_id": 0, "attention_bias": False}),
    "glm4-lite": ("Glm4MoeLite", {**DEEPSEEK, "n_group": 1, "topk_group": 1, "v_head_dim": 24}),
    "minimax-m2": ("MiniMaxM2", MINIMAX),
    "ministral3": ("Ministral3", MINISTRAL3),
    "seed-oss": ("SeedOss", {"attention_bias": True}),
    "seed-oss-biased": (
        "SeedOss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0], "pad_token_id": 0}),
    "smollm3-sliding": (
        "SmolLM3",
        {**SWITCHED, "no_rope_layer_interval": 2, "attention_bias": True, "pad_token_id": 0},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2", {**SWITCHED, "max_window_layers": 1}),
    "qwen2-moe": ("Qwen2Moe", SHARED),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-sliding": ("Qwen3", {**SWITCHED, "max_window_layers": 1}),
    "qwen3-mixed": ("Qwen3", {**SWITCHED, **MIXED}),
    "qwen3-next": ("Qwen3Next", {**HYBRID, **SHARED, "mlp_only_layers": [1]}),
    "qwen3-next-dense": ("Qwen3Next", {**BLOCKS, **SHARED, "mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3.5": ("Qwen3_5", {**BLOCKS, **THREE_AXES}),
    "qwen3.5-interval": (
        "Qwen3_5",
        {**BLOCKS, "layer_types": None, "full_attention_interval": 2, "attention_bias": True},
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", {**BLOCKS, **THREE_AXES, **SHARED}),
    "lfm2": ("Lfm2", {**CONVS, "block_multiple_of": 16}),
    "lfm2-indexed": (
        "Lfm2",
        {**CONVS, "layer_types": None, "full_attn_idxs": [0, 2], "conv_bias": True},
    ),
    "lfm2-moe": ("Lfm2Moe", {**CONVS, **EXPERTS, "num_dense_layers": 1}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
}

# Without code of aserve's own: these run in transformers' code.
OTHER_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("Cohere", {"logit_scale": 4.0}),
    "cohere2": ("Cohere2", {"logit_scale": 4.0, **MIXED}),
    "gpt-neox": ("GPTNeoX", {"hidden_size": 64}),
    "olmo": ("Olmo", {"clip_qkv": 2.0}),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "starcoder2": ("Starcoder2", {"sliding_window": 24}),
}


@dataclass(frozen=True)
class Reference:
    directory: Path  # where it is saved
    prompt: Tensor  # int64 [PROMPT_LEN]
    greedy: Tensor  # int64 [NUM_GREEDY], what follows the prompt
    logits: Tensor  # float32 [PROMPT_LEN + NUM_GREEDY - 1, vocab], of the prompt and what follows
    neighbour: Tensor  # int64 [PROMPT_LEN], another prompt
    neighbour_logits: Tensor  # float32 [PROMPT_LEN, vocab]

    @property
    def tokens(self) -> Tensor:
        """int64: the tokens that `logits` are of."""
        return torch.cat((self.prompt, self.greedy[:-1]))


def make_reference(kind: str, directory: Path) -> Reference:
    model = new_model(kind)
    _fix_frequencies(model)
    generator = torch.Generator().manual_seed(7)
    prompt, neighbour = torch.randint(VOCAB_SIZE, (2, PROMPT_LEN), generator=generator)
    greedy = _scale_until_varied(model, prompt)
    tokens = torch.cat((prompt, greedy[:-1]))
    with torch.inference_mode():
        logits = model(tokens.unsqueeze(0)).logits[0]
        neighbour_logits = model(neighbour.unsqueeze(0)).logits[0]
    model.save_pretrained(directory)
    if kind == "longcat-flash":
        drop_identity_experts(directory / "model.safetensors")
    return Reference(directory, prompt, greedy, logits, neighbour, neighbour_logits)


def drop_identity_experts(path: Path) -> None:
    """transformers writes gates without meaning for them, which the published checkpoints lack."""
    names = tuple(f".mlp.experts.{number}." for number in (6, 7, 8))
    tensors = load_file(path)
    kept = {n: tensor for n, tensor in tensors.items() if not any(part in n for part in names)}
    assert len(kept) < len(tensors)
    save_file(kept, path)


def new_model(kind: str, **sizes: Any) -> Any:
    import transformers

    family, fields = {**KINDS, **OTHER_KINDS}[kind]
    causal_lm = getattr(transformers, f"{family}ForCausalLM")
    config = causal_lm.config_class(**{**BASE, **fields, **sizes})
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = causal_lm(config).eval()
    _randomise_vectors(model)
    return model


def _randomise_vectors(model: Any) -> None:
    """Norms start at one and biases at zero, where mixing them up would not be seen."""
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            centre = 0.0 if name.endswith(("bias", "sinks")) else 1.0
            torch.nn.init.normal_(weight, mean=centre, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)


def _fix_frequencies(model: Any) -> None:
    """Dynamic and longrope choose frequencies by the length of each call; an engine that shares KV
    cannot. Here they are those of MAX_MODEL_LEN, by the reference's own formula."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is not None and rotary.rope_type in ("dynamic", "longrope"):
        formula = ROPE_INIT_FUNCTIONS[rotary.rope_type]
        rotary.inv_freq, rotary.attention_scaling = formula(model.config, seq_len=MAX_MODEL_LEN)
        rotary.rope_type = "default"


def _scale_until_varied(model: Any, prompt: Tensor) -> Tensor:
    for _ in range(12):
        greedy = _greedy(model, prompt)
        if len(greedy.unique()) >= MIN_DISTINCT:
            return greedy
        with torch.no_grad():
            for name, weight in _layers(model).named_parameters():
                sharpens = weight.ndim >= 2 or "q_norm" in name or "k_norm" in name
                weight.mul_(1.25 if sharpens else 1.0)
    raise AssertionError(f"the reference never left its {len(greedy.unique())} tokens")


def _layers(model: Any) -> torch.nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))


def _greedy(model: Any, prompt: Tensor) -> Tensor:
    """Positions are given, because Bamba's code does not count those in the cache."""
    tokens, cache = [], None
    ids, positions = prompt.unsqueeze(0), torch.arange(len(prompt)).unsqueeze(0)
    with torch.inference_mode():
        for _ in range(NUM_GREEDY):
            output = model(ids, position_ids=positions, past_key_values=cache, use_cache=True)
            positions = positions[:, -1:] + 1
            cache = output.past_key_values
            ids = output.logits[:, -1:].argmax(-1)
            tokens.append(ids[0, 0])
    return torch.stack(tokens)
