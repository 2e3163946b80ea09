"""Published drafters by name: the configs, names and shapes that their checkpoints have, and those
of their targets. No values: a checkpoint of gigabytes is a file with holes here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
Tensors = dict[str, tuple[str, Shape]]  # dtypes and shapes, by name
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "BOOL": 1}

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIMO_7B: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["MiMoForCausalLM"],
    "vocab_size": 151680,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000.0,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


@dataclass(frozen=True)
class Published:
    algorithm: str
    target: Mapping[str, Any]
    config: Mapping[str, Any]
    tensors: Tensors
    num_drafts: int  # by default
    draft_vocab_size: int
    is_in_target: bool = False  # its tensors are in the target's checkpoint


def of_dtype(dtype: str, shapes: Mapping[str, Shape]) -> Tensors:
    return {name: (dtype, shape) for name, shape in shapes.items()}


def layer(
    prefix: str, config: Mapping[str, Any], *, in_features: int | None = None
) -> dict[str, Shape]:
    """The products of a Llama layer."""
    size, mlp = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", size // config["num_attention_heads"])
    q, kv = (head_dim * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    wide = in_features or size
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, wide),
        f"{prefix}.self_attn.k_proj.weight": (kv, wide),
        f"{prefix}.self_attn.v_proj.weight": (kv, wide),
        f"{prefix}.self_attn.o_proj.weight": (size, q),
        f"{prefix}.mlp.gate_proj.weight": (mlp, size),
        f"{prefix}.mlp.up_proj.weight": (mlp, size),
        f"{prefix}.mlp.down_proj.weight": (size, mlp),
    }


def norms(size: int, *names: str) -> dict[str, Shape]:
    return {f"{name}.weight": (size,) for name in names}


def eagle_3(prefix: str, config: Mapping[str, Any], dtype: str, num_drafted: int) -> Tensors:
    size = config["hidden_size"]
    own = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes = {
        **layer(prefix, config, in_features=2 * size),
        **norms(size, "norm", *(f"{prefix}.{name}" for name in own)),
        "fc.weight": (size, 3 * size),
        "lm_head.weight": (num_drafted, size),
    }
    tables: Tensors = {"d2t": ("I64", (num_drafted,)), "t2d": ("BOOL", (config["vocab_size"],))}
    return {**of_dtype(dtype, shapes), **tables}


def llama_head(vocab_size: int, **fields: Any) -> dict[str, Any]:
    """The config of EAGLE's heads for Llama 3."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        **fields,
    }


EAGLE_1 = llama_head(128256, bias=False)
EAGLE_3 = llama_head(128256, draft_vocab_size=32000)
QWEN_LAYER = {
    **llama_head(151936, intermediate_size=12288, head_dim=128, rope_theta=1000000.0),
    "torch_dtype": "bfloat16",
}
ANGEL_SLIM = {
    **QWEN_LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
}
SPECULATOR = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
    "transformer_layer_config": {**QWEN_LAYER, "architectures": None},
}
DFLASH = {
    **QWEN3_8B,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


def dflash_tensors() -> Tensors:
    shapes: dict[str, Shape] = {
        "fc.weight": (4096, 5 * 4096),
        **norms(4096, "hidden_norm", "norm"),
    }
    for index in range(5):
        prefix = f"layers.{index}"
        shapes |= layer(prefix, QWEN3_8B)
        shapes |= norms(4096, *(f"{prefix}.{x}_layernorm" for x in ("input", "post_attention")))
        shapes |= norms(128, *(f"{prefix}.self_attn.{x}_norm" for x in ("q", "k")))
    return of_dtype("BF16", shapes)


def mimo_tensors() -> Tensors:
    prefix = "model.mtp_layers.0"
    names = ("input", "post_attention")
    own = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    shapes = {
        **layer(prefix, MIMO_7B),
        **norms(4096, *(f"{prefix}.{x}_layernorm" for x in names), *(f"{prefix}.{x}" for x in own)),
        **{
            f"{prefix}.self_attn.{x}_proj.bias": (size,)
            for x, size in (("q", 4096), ("k", 1024), ("v", 1024))
        },
        f"{prefix}.input_proj.weight": (4096, 2 * 4096),
        "model.norm.weight": (4096,),  # and all other tensors of the target
    }
    return of_dtype("BF16", shapes)


def deepseek_tensors() -> Tensors:
    """Layer 61: products in fp8 with the scales of their blocks, the rest in bfloat16."""
    prefix, size = "model.layers.61", 7168
    attention = {
        "q_a_proj": (1536, size),
        "q_b_proj": (128 * 192, 1536),
        "kv_a_proj_with_mqa": (512 + 64, size),
        "kv_b_proj": (128 * 256, 512),
        "o_proj": (size, 128 * 128),
    }
    products = {f"{prefix}.self_attn.{name}": shape for name, shape in attention.items()}
    for expert in (*(f"experts.{n}" for n in range(256)), "shared_experts"):
        products[f"{prefix}.mlp.{expert}.gate_proj"] = (2048, size)
        products[f"{prefix}.mlp.{expert}.up_proj"] = (2048, size)
        products[f"{prefix}.mlp.{expert}.down_proj"] = (size, 2048)
    names = ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm")
    wide = {
        **norms(size, *(f"{prefix}.{name}" for name in names)),
        **norms(1536, f"{prefix}.self_attn.q_a_layernorm"),
        **norms(512, f"{prefix}.self_attn.kv_a_layernorm"),
        f"{prefix}.eh_proj.weight": (size, 2 * size),
        f"{prefix}.embed_tokens.weight": (129280, size),
        f"{prefix}.shared_head.head.weight": (129280, size),
        f"{prefix}.mlp.gate.weight": (256, size),
    }
    return {
        **of_dtype("BF16", wide),
        f"{prefix}.mlp.gate.e_score_correction_bias": ("F32", (256,)),
        **of_dtype("F8_E4M3", {f"{name}.weight": shape for name, shape in products.items()}),
        **of_dtype(
            "F32",
            {
                f"{name}.weight_scale_inv": tuple(-(-n // 128) for n in shape)
                for name, shape in products.items()
            },
        ),
    }


PUBLISHED: dict[str, Published] = {
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": Published(
        "EAGLE",
        LLAMA_31_8B,
        EAGLE_1,
        of_dtype(
            "F16",
            {
                **layer("layers.0", EAGLE_1),
                **norms(4096, "layers.0.post_attention_layernorm"),
                "fc.weight": (4096, 2 * 4096),
                "embed_tokens.weight": (128256, 4096),
            },
        ),
        num_drafts=4,
        draft_vocab_size=128256,
    ),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Published(
        "EAGLE3",
        LLAMA_31_8B,
        EAGLE_3,
        eagle_3("midlayer", EAGLE_3, "F16", 32000),
        num_drafts=4,
        draft_vocab_size=32000,
    ),
    "AngelSlim/Qwen3-8B_eagle3": Published(
        "EAGLE3",
        QWEN3_8B,
        ANGEL_SLIM,
        eagle_3("midlayer", ANGEL_SLIM, "BF16", 32000),
        num_drafts=4,
        draft_vocab_size=32000,
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": Published(
        "EAGLE3",
        QWEN3_8B,
        SPECULATOR,
        {
            **eagle_3("layers.0", QWEN_LAYER, "BF16", 32000),
            "embed_tokens.weight": ("BF16", (151936, 4096)),
        },
        num_drafts=4,
        draft_vocab_size=32000,
    ),
    "z-lab/Qwen3-8B-DFlash-b16": Published(
        "DFLASH", QWEN3_8B, DFLASH, dflash_tensors(), num_drafts=15, draft_vocab_size=151936
    ),
    "XiaomiMiMo/MiMo-7B-RL": Published(
        "NEXTN",
        MIMO_7B,
        MIMO_7B,
        mimo_tensors(),
        num_drafts=4,
        draft_vocab_size=151680,
        is_in_target=True,
    ),
    "deepseek-ai/DeepSeek-V3": Published(
        "NEXTN",
        DEEPSEEK_V3,
        DEEPSEEK_V3,
        deepseek_tensors(),
        num_drafts=4,
        draft_vocab_size=129280,
        is_in_target=True,
    ),
}


def as_transformers_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config in the other dialect: `rope_parameters` and `dtype`."""
    made = dict(config)
    if "transformer_layer_config" in made:
        made["transformer_layer_config"] = as_transformers_5(made["transformer_layer_config"])
    if "rope_theta" in made:
        scaling = dict(made.pop("rope_scaling", None) or {"rope_type": "default"})
        scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type"))
        made["rope_parameters"] = {**scaling, "rope_theta": made.pop("rope_theta")}
    if "torch_dtype" in made:
        made["dtype"] = made.pop("torch_dtype")
    return made


def write_holes(directory: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Writes a checkpoint whose values are zeros that take no room."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory
