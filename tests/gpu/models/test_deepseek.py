"""The published configurations of DeepSeek: what they mean, and the tensors that they ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import parse_config
from aserve.gpu.models.config.quantization import quantization_of
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.weights.fp8 import Fp8
from aserve.gpu.weights.inventory import Inventory
from tests.gpu.device_tables import make_pools

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
# With fewer layers than are published.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
V32 = {
    **V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}


def built(fields: dict[str, Any]) -> tuple[Decoder, Inventory]:
    """The model on meta tensors, and what it asked for."""
    family, inventory = FAMILIES[fields["architectures"][0]], Inventory(torch.bfloat16)
    config = parse_config(Fields(fields, source="config.json"), defaults=family.defaults)
    model = family.build(config, inventory, max_model_len=1)
    assert isinstance(model, Decoder)
    return model, inventory


@pytest.mark.parametrize(
    ("fields", "scale", "shapes"),
    [
        (
            V2_LITE,
            192**-0.5 * 1.2608**2,  # 0.1 * 0.707 * ln(40) + 1
            {
                "0.self_attn.q_proj": (3072, 2048),
                "0.self_attn.kv_a_proj_with_mqa": (576, 2048),
                "0.self_attn.kv_b_proj": (4096, 512),
                "0.mlp.gate_proj": (10944, 2048),
                "1.mlp.experts.63.down_proj": (2048, 1408),
                "1.mlp.shared_experts.up_proj": (2816, 2048),
            },
        ),
        (
            V3,
            192**-0.5 * 1.36889**2,
            {
                "0.self_attn.q_b_proj": (24576, 1536),
                "0.self_attn.o_proj": (7168, 16384),
                "2.mlp.down_proj": (7168, 18432),
                "3.mlp.experts.255.gate_proj": (2048, 7168),
                "3.mlp.gate": (256, 7168),
            },
        ),
        (
            V32,
            192**-0.5 * 1.36889**2,
            {
                "0.self_attn.indexer.wq_b": (8192, 1536),
                "1.self_attn.indexer.wk": (128, 7168),
                "2.self_attn.indexer.k_norm": (128,),
                "3.self_attn.indexer.weights_proj": (64, 7168),
            },
        ),
    ],
)
def test_published_configurations_name_the_published_tensors(
    fields: dict[str, Any], scale: float, shapes: dict[str, tuple[int, ...]]
) -> None:
    model, inventory = built(fields)
    for name, shape in shapes.items():
        assert inventory.shapes[f"model.layers.{name}.weight"] == shape
    has_bias = "model.layers.3.mlp.gate.e_score_correction_bias" in inventory.shapes
    assert has_bias == (fields is not V2_LITE)
    layer = model.layers[0]
    assert (layer.head_dim, layer.value_dim, layer.expanded_dim) == (576, 512, 256)
    assert (layer.index_dim, layer.index_top_k) == ((128, 2048) if fields is V32 else (0, 0))
    assert layer.scale == pytest.approx(scale, rel=1e-4)
    stored = quantization_of(Fields(fields, source=""))
    assert stored == (None if fields is V2_LITE else Fp8((128, 128)))


def test_the_cache_holds_one_latent_for_a_token_in_each_layer() -> None:
    """DeepSeek-V3: 1,152 bytes in bfloat16, where keys and values of all heads take 71 times as
    many."""
    model, _ = built(V3)
    pools = make_pools(model.layers, 9, table_shape=(2, 4), page_size=16, dtype=torch.bfloat16)
    num_bytes = (pools.size_bytes - pools.token_pool.nbytes) / (9 * 16 * len(model.layers))
    assert num_bytes == (512 + 64) * 2
    assert 71 < 128 * (192 + 128) * 2 / num_bytes < 72


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob is True; expected false"),
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; expected greedy or"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; expected an even number"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; expected 1"),
        ({"q_lora_rank": None}, "q_lora_rank is missing; expected a number: the indexer"),
        ({"index_head_dim": 32}, "index_head_dim is 32; expected at least qk_rope_head_dim"),
        ({"indexer_types": ["full", "shared"]}, "indexer_types is .*; expected an indexer in each"),
        ({"index_topk_freq": 4}, "index_topk_freq is 4; expected an indexer in each layer"),
        ({"index_topk_pattern": "FSS"}, "index_topk_pattern is 'FSS'; expected an indexer in each"),
    ],
)
def test_what_no_published_model_has_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built({**(V32 if "index" in message else V2_LITE), **changes})
