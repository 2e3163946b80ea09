"""Sparse attention: the `mla` member with DeepSeek-V3.2's indexer in each layer.

    I_{t,s} = sum_h w_{t,h} relu(q^I_{t,h} . k^I_s)

A query attends to the `index_topk` keys of the largest I. Only the indexers are trained: the
softmax of I over the keys follows the dense attention, summed over its heads, by the KL divergence
(the warm-up stage of DeepSeek-V3.2).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

from tools.train_models.folder import MODELS_DIR, fused
from tools.train_models.language import loss_figures
from tools.train_models.latent_start import ROPE_THETA
from tools.train_models.member import Figure, Member, published_config
from tools.train_models.mla import ATTENTION, EXPERTS, NUM_LAYERS, Mla
from tools.train_models.recipes import CAUSAL_QUICK
from tools.train_tiny.evaluate import held_out_rows
from tools.train_tiny.export import WEIGHTS
from tools.train_tiny.packing import Batch
from tools.train_tiny.recipe import LONG, Rates, Recipe, Stage

NUM_HEADS, HEAD_DIM, TOP_K = 2, 96, 32
ALL_KEYS = 1 << 20
KINDS = ("story", "recall", "conversation")


class Dsa(Member):
    about = (
        "The `mla` member with the indexer of DeepSeek-V3.2 (sparse attention): each query attends "
        f"to the {TOP_K} keys that the indexer of the layer scores highest. All other weights are "
        "those of `mla`, without its NextN layer."
    )
    notes = (
        "Tensors `self_attn.indexer.*` beside those of `mla`; `k_norm` is a LayerNorm with a bias. "
        "The rope of the indexer turns the first 64 dimensions of its heads in rotated halves, "
        "while that of the attention is interleaved. The scores are scaled by the roots of "
        "`index_head_dim` and `index_n_heads`, which changes no choice."
    )
    recipe = Recipe(
        stages=(Stage("indexers", length=384, rows=2, steps=600, shares=LONG, opening=0.5),),
        rates=Rates(muon=2e-2, adam=1e-2, warmup_steps=10, decay_part=0.6),
        tokenizer_documents=0,
        tokenizer_kinds=frozenset(),
    )
    quick = CAUSAL_QUICK

    def config(self) -> dict[str, object]:
        return published_config(
            "DeepseekV32ForCausalLM",
            "deepseek_v32",
            rope_theta=ROPE_THETA,
            num_hidden_layers=NUM_LAYERS,
            num_nextn_predict_layers=0,
            **ATTENTION,
            **EXPERTS,
            index_n_heads=NUM_HEADS,
            index_head_dim=HEAD_DIM,
            index_topk=TOP_K,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        )

    def empty(self) -> nn.Module:
        fields: dict[str, Any] = self.config()
        config: Any = DeepseekV32Config(**fields)
        config._experts_implementation = "eager"
        config._attn_implementation = "eager"
        model: Any = DeepseekV32ForCausalLM(config).float()
        assert isinstance(model, nn.Module)
        return model

    def start(self, network: nn.Module) -> None:
        """Takes the weights of the saved `mla`, if it is there, and leaves them as they are."""
        found = network.load_state_dict(mla_tensors(), strict=False)
        assert all("indexer" in name for name in found.missing_keys)
        for name, weight in network.named_parameters():
            weight.requires_grad_("indexer" in name)
            if "indexer" in name and weight.ndim == 2:
                nn.init.normal_(weight, std=2 * weight.shape[1] ** -0.5)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        losses = [
            divergence(dense, scores)
            for dense, scores in attention_and_scores(network, batch.ids[:, :-1])
        ]
        return torch.stack(losses).mean()

    def figures(self, network: nn.Module, tokenizer: Tokenizer, *, is_quick: bool) -> list[Figure]:
        covered, best = coverage(network, tokenizer, count=1 if is_quick else 8)
        model: Any = network

        def sparse(ids: Tensor) -> Tensor:
            logits: Tensor = model(ids, use_cache=False).logits
            return logits

        def dense(ids: Tensor) -> Tensor:
            with attending_to(network, ALL_KEYS):
                return sparse(ids)

        both = [
            loss_figures(logits_of, tokenizer, is_quick=is_quick) for logits_of in (sparse, dense)
        ]
        return [
            Figure(
                f"attention of the chosen {TOP_K} keys, of queries with more "
                f"(of the {TOP_K} that have most: {best:.1%})",
                f"{covered:.1%}",
            ),
            Figure(
                "share of the most attention that so many keys can have",
                f"{covered / best:.1%}",
                "95 %",
            ),
            *(
                Figure(f"{one.name} (dense attention: {other.value})", one.value)
                for one, other in zip(*both, strict=True)
            ),
        ]


def mla_tensors() -> dict[str, Tensor]:
    """Returns the weights of the saved `mla` without its NextN layer."""
    path = MODELS_DIR / "mla" / WEIGHTS
    tensors = fused(load_file(path)) if path.exists() else Mla().build().state_dict()
    nextn = f"model.layers.{NUM_LAYERS}."
    return {name: weight.float() for name, weight in tensors.items() if not name.startswith(nextn)}


@contextmanager
def attending_to(network: nn.Module, count: int) -> Iterator[None]:
    """Lets the queries of all layers attend to `count` keys."""
    indexers: list[Any] = [layer.self_attn.indexer for layer in layers_of(network)]
    for indexer in indexers:
        indexer.index_topk = count
    try:
        yield
    finally:
        for indexer in indexers:
            indexer.index_topk = TOP_K


def layers_of(network: nn.Module) -> list[Any]:
    model: Any = network
    return list(model.model.layers)


def attention_and_scores(network: nn.Module, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns of each layer the dense attention, which is the mean of its heads, and the scores of
    the indexer, both [rows, queries, keys].
    """
    inputs: dict[int, tuple[Any, ...]] = {}
    handles = [
        layer.self_attn.indexer.register_forward_pre_hook(
            lambda _, given, index=index: inputs.__setitem__(index, given)
        )
        for index, layer in enumerate(layers_of(network))
    ]
    model: Any = network
    with attending_to(network, ALL_KEYS), torch.no_grad():
        attentions = model(ids, use_cache=False, output_attentions=True).attentions
    for handle in handles:
        handle.remove()
    return [
        (attention.float().mean(dim=1), index_scores(layer.self_attn.indexer, *inputs[index][:3]))
        for index, (layer, attention) in enumerate(zip(layers_of(network), attentions, strict=True))
    ]


def index_scores(indexer: Any, hidden: Tensor, queries_in: Tensor, rotary: Any) -> Tensor:
    """Returns the scores [rows, queries, keys] before any mask, as transformers computes them."""
    queries = indexer.wq_b(queries_in).unflatten(-1, (NUM_HEADS, HEAD_DIM))
    keys = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    size = indexer.qk_rope_head_dim
    turned = apply_rotary_pos_emb(queries[..., :size], keys[..., :size], *rotary, unsqueeze_dim=2)
    queries = torch.cat((turned[0], queries[..., size:]), dim=-1).float()
    keys = torch.cat((turned[1], keys[..., size:]), dim=-1).float()
    products = torch.einsum("rqhd,rkd->rqhk", queries, keys[:, :, 0]).relu() * HEAD_DIM**-0.5
    weights = indexer.weights_proj(hidden).float() * NUM_HEADS**-0.5
    scores: Tensor = torch.einsum("rqh,rqhk->rqk", weights, products)
    return scores


def divergence(dense: Tensor, scores: Tensor) -> Tensor:
    """The KL divergence of softmax(scores) from the dense attention, mean over the queries."""
    logs = masked(scores).log_softmax(dim=-1).clamp(min=-100.0)
    entropy: Tensor = torch.special.entr(dense).sum(dim=-1)
    return (-(dense * logs).sum(dim=-1) - entropy).mean()


def masked(scores: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1])
    return scores.masked_fill(place[:, None] < place, -torch.inf)


@torch.inference_mode()
def coverage(network: nn.Module, tokenizer: Tokenizer, *, count: int) -> tuple[float, float]:
    """Returns the mean attention that the chosen keys get, of queries that cannot take all keys,
    and the most that as many keys could get.

    NOTE: the attention of `mla` is spread, so that a perfect indexer covers less than all of it.
    """
    chosen: list[Tensor] = []
    most: list[Tensor] = []
    rows = [row for kind in KINDS for row in held_out_rows(tokenizer, kind, count)]
    for row in rows:
        for dense, scores in attention_and_scores(network, torch.tensor([row])):
            best = masked(scores)[:, TOP_K:].topk(TOP_K, dim=-1).indices
            own = dense[:, TOP_K:]
            chosen.append(own.gather(-1, best).sum(dim=-1).flatten())
            most.append(own.topk(TOP_K, dim=-1).values.sum(dim=-1).flatten())
    return float(torch.cat(chosen).mean()), float(torch.cat(most).mean())
