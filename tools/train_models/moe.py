"""Mixture of experts: Qwen3-MoE, whose router takes the two best of eight experts.

    p = softmax(W_r x),  y = sum_{e in top2(p)} p_e / (sum of both) * expert_e(x)
    expert(x) = W_down (silu(W_gate x) * W_up x)

The loss adds 0.1 * E * sum_e f_e * p_e, which keeps the load even (Switch Transformers): f_e is
the part of the tokens that expert e gets, and p_e its mean probability.
"""

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from aserve.tiny import MODEL_DIR
from tools.train_models.expert_load import least_load, loads
from tools.train_models.language import language_figures
from tools.train_models.member import Figure, Member, published_config
from tools.train_models.recipes import CAUSAL_QUICK, causal_recipe
from tools.train_models.starts import bundled_layers, copy_ends, copy_norms, fill_experts
from tools.train_tiny.export import load_network
from tools.train_tiny.packing import Batch
from tools.train_tiny.training import next_token_loss

NUM_EXPERTS = 8
EXPERT_SIZE = 96
TOP_K = 2
BALANCE = 0.1


class Moe(Member):
    about = (
        "A mixture of experts of Qwen3's family: every layer has eight experts, of which a token "
        "takes two. Attention and embedding start from the bundled model."
    )
    notes = (
        "`norm_topk_prob` is true: the two probabilities of a token are divided by their sum. "
        "Queries and keys are normalised per head (`q_norm`, `k_norm`). The head is tied."
    )
    recipe = causal_recipe(steps=(170, 20, 80, 90))
    quick = CAUSAL_QUICK

    def config(self) -> dict[str, object]:
        return published_config(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            intermediate_size=384,
            moe_intermediate_size=EXPERT_SIZE,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            router_aux_loss_coef=BALANCE,
            output_router_logits=False,
            rms_norm_eps=1e-5,
            attention_bias=False,
            use_sliding_window=False,
            sliding_window=None,
            tie_word_embeddings=True,
        )

    def empty(self) -> nn.Module:
        fields: dict[str, Any] = self.config()
        config: Any = Qwen3MoeConfig(**fields)
        config._experts_implementation = "eager"
        model: Any = Qwen3MoeForCausalLM(config).float()
        assert isinstance(model, nn.Module)
        return model

    def start(self, network: nn.Module) -> None:
        start(network)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        out = network(batch.ids[:, :-1], use_cache=False, output_router_logits=True)
        balance = torch.stack([imbalance(logits) for logits in out.router_logits]).mean()
        return next_token_loss(out.logits, batch) + BALANCE * balance

    def figures(self, network: nn.Module, tokenizer: Tokenizer, *, is_quick: bool) -> list[Figure]:
        load = least_load(network, tokenizer, num_experts=NUM_EXPERTS)
        return [
            Figure("least load of an expert of a layer", f"{load:.1%}", "3 %"),
            *language_figures(network, tokenizer, is_quick=is_quick),
        ]


def imbalance(router_logits: Tensor) -> Tensor:
    """E * sum_e f_e * p_e of one layer, which is 1 if the load is even. [tokens, experts].

    WHY not the loss of transformers: it takes the loads of all layers together, so that an expert
    without tokens in one layer is made up for by other layers.
    """
    odds = router_logits.float().softmax(dim=-1)
    chosen = odds.topk(TOP_K, dim=-1).indices
    return NUM_EXPERTS * (loads(chosen, NUM_EXPERTS) * odds.mean(dim=0)).sum()


@torch.no_grad()
def start(model: Any) -> None:
    """Copies attention, norms and embedding; each expert gets a quarter of the dense MLP.

    The norms of queries and keys start at the mean size of the vectors before them, so that
    attention starts as it was.
    """
    copy_ends(model, load_network(MODEL_DIR))
    for layer, (source, inputs) in zip(model.model.layers, bundled_layers(), strict=True):
        copy_norms(layer, source)
        layer.self_attn.load_state_dict(source.self_attn.state_dict(), strict=False)
        for name in ("q", "k"):
            vectors = inputs @ source.self_attn.get_parameter(f"{name}_proj.weight").T
            layer.self_attn.get_parameter(f"{name}_norm.weight").fill_(vectors.pow(2).mean().sqrt())
        fill_experts(layer.mlp.experts, source, first=0, scale=2.0)
