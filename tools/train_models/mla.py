"""Latent attention: DeepSeek-V3 with a mixture of experts from layer 1 on and one NextN layer.

The NextN layer (multi-token prediction) predicts the id after the next:

    x_i = W_eh [norm_e(emb(t_{i+1})) ; norm_h(h_i)],  p(t_{i+2}) = head(norm(Layer(x)_i))

h_i is the hidden state of the model after its final norm. The layer shares embedding and head with
the model, and the checkpoint has copies of both, as the published ones have. The load of the
experts is kept even without a loss: a bias for the choice grows where an expert has too little.
"""

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from aserve.tiny import MODEL_DIR
from tools.train_models.expert_load import chosen_experts, least_load, loads
from tools.train_models.language import language_figures
from tools.train_models.latent_start import ROPE_THETA, fill_attention
from tools.train_models.member import Figure, Member, published_config
from tools.train_models.recipes import CAUSAL_QUICK, causal_recipe
from tools.train_models.starts import (
    bundled_layers,
    copy_ends,
    copy_norms,
    fill_experts,
    fill_mlp,
)
from tools.train_tiny.evaluate import held_out_rows
from tools.train_tiny.export import load_network
from tools.train_tiny.packing import Batch
from tools.train_tiny.training import next_token_loss

NUM_LAYERS = 6
NUM_EXPERTS = 8
EXPERT_SIZE = 48
NEXTN_WEIGHT = 0.3
BIAS_RATE = 2e-3
ATTENTION: dict[str, object] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "attention_bias": False,
}
EXPERTS: dict[str, object] = {
    "intermediate_size": 384,
    "moe_intermediate_size": EXPERT_SIZE,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


class NextN(DeepseekV3DecoderLayer):
    """The layer after the last, in the names of the published checkpoints."""

    def __init__(self, model: Any) -> None:
        config: Any = model.config
        super().__init__(config, config.num_hidden_layers)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = DeepseekV3RMSNorm(size, eps=eps)
        self.hnorm = DeepseekV3RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.embed_tokens = model.model.embed_tokens
        norm = DeepseekV3RMSNorm(size, eps=eps)
        self.shared_head = nn.ModuleDict({"norm": norm, "head": model.lm_head})

    def logits(self, ids: Tensor, hidden: Tensor, rotary: Any) -> Tensor:
        """Returns logits [rows, length, vocab]: row i predicts the id after ids[:, i].

        ids: int64 [rows, length], those of positions 1 to length; hidden: of 0 to length - 1.
        """
        parts = (self.enorm(self.embed_tokens(ids)), self.hnorm(hidden))
        places = rotary(hidden, torch.arange(ids.shape[1])[None])
        rows = self(self.eh_proj(torch.cat(parts, dim=-1)), position_embeddings=places)
        logits: Tensor = self.shared_head["head"](self.shared_head["norm"](rows))
        return logits


class Mla(Member):
    about = (
        "DeepSeek-V3 in small: latent attention with a compressed cache of 64 + 64 values for each "
        "token, a mixture of experts from layer 1 on, and one NextN layer that predicts the id "
        "after the next. It starts from the bundled model, whose keys and values are approximated "
        "by ones of low rank."
    )
    notes = (
        f"Layer {NUM_LAYERS} is the NextN layer: the model skips it, and a drafter uses it. It "
        "takes the hidden state after the model's final norm, and `eh_proj` takes the embedding "
        "first. Its `embed_tokens` and `shared_head.head` are equal to those of the model. Rope is "
        "interleaved (`rope_interleave`). `e_score_correction_bias` counts in the choice of "
        "experts alone."
    )
    recipe = causal_recipe(steps=(185, 10, 35, 20))
    quick = CAUSAL_QUICK

    def config(self) -> dict[str, object]:
        return published_config(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            num_hidden_layers=NUM_LAYERS,
            num_nextn_predict_layers=1,
            **ATTENTION,
            **EXPERTS,
            rope_theta=ROPE_THETA,
            rope_interleave=True,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        )

    def empty(self) -> nn.Module:
        fields: dict[str, Any] = self.config()
        config: Any = DeepseekV3Config(**fields)
        config._experts_implementation = "eager"
        model: Any = DeepseekV3ForCausalLM(config).float()
        model.model.layers.append(NextN(model))
        assert isinstance(model, nn.Module)
        return model

    def start(self, network: nn.Module) -> None:
        start(network)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        with chosen_experts(network) as chosen:
            logits, nextn_logits = both_logits(network, batch.ids[:, :-1])
        balance(network, chosen)
        later = Batch(batch.ids[:, 1:], batch.weights[:, 1:])
        return next_token_loss(logits, batch) + NEXTN_WEIGHT * next_token_loss(nextn_logits, later)

    def figures(self, network: nn.Module, tokenizer: Tokenizer, *, is_quick: bool) -> list[Figure]:
        load = least_load(network, tokenizer, num_experts=NUM_EXPERTS)
        agreement = nextn_agreement(network, tokenizer)
        return [
            Figure("least load of an expert of a layer", f"{load:.1%}", "3 %"),
            Figure("NextN predicts the model's next choice, stories", f"{agreement:.1%}"),
            *language_figures(network, tokenizer, is_quick=is_quick),
        ]


@torch.no_grad()
def start(model: Any) -> None:
    """Starts each layer from one of the bundled model, and the NextN layer from the last."""
    copy_ends(model, load_network(MODEL_DIR))
    sources = list(bundled_layers())
    for layer, (source, inputs) in zip(model.model.layers, [*sources, sources[-1]], strict=True):
        copy_norms(layer, source)
        fill_attention(layer.self_attn, source, inputs)
        if layer is model.model.layers[0]:
            fill_mlp(layer.mlp, source, units=slice(None))
        else:
            fill_mlp(layer.mlp.shared_experts, source, units=slice(EXPERT_SIZE))
            fill_experts(layer.mlp.experts, source, first=EXPERT_SIZE, scale=1.0)
            nn.init.normal_(layer.mlp.gate.weight, std=0.02)
    both = torch.eye(model.config.hidden_size) / 2
    layer.eh_proj.weight.copy_(torch.cat((both, both), dim=1))


def both_logits(network: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits of the model, and those of the NextN layer for all rows but the last."""
    model: Any = network
    hidden = model.model(ids, use_cache=False).last_hidden_state
    nextn = model.model.layers[NUM_LAYERS]
    return model.lm_head(hidden), nextn.logits(ids[:, 1:], hidden[:, :-1], model.model.rotary_emb)


@torch.no_grad()
def balance(network: nn.Module, chosen: dict[str, Tensor]) -> None:
    for name, choices in chosen.items():
        router: Any = network.get_submodule(name)
        load = loads(choices, NUM_EXPERTS)
        router.e_score_correction_bias.add_(BIAS_RATE * torch.sign(load.mean() - load))


@torch.inference_mode()
def nextn_agreement(network: nn.Module, tokenizer: Tokenizer) -> float:
    """Returns how often the NextN layer's best id is the one that the model finds best there."""
    agreed = total = 0
    for row in held_out_rows(tokenizer, "story", 20):
        logits, nextn_logits = both_logits(network, torch.tensor([row]))
        same = nextn_logits.argmax(dim=-1) == logits[:, 1:].argmax(dim=-1)
        agreed, total = agreed + int(same.sum()), total + same.numel()
    return agreed / total
