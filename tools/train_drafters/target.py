"""What a drafter takes from the target: hidden states, logits, and keys and values of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tools.train_tiny.network import Layer, Llama


@dataclass(frozen=True)
class TargetStates:
    """A forward pass of the target over whole rows.

    `residuals[i]` is the residual stream after layer i, before the final norm; it is
    `hidden_states[i + 1]` of transformers. The logits of row i predict the id of position i + 1.
    """

    ids: Tensor  # int64 [rows, length]
    residuals: tuple[Tensor, ...]  # of each layer [rows, length, hidden]
    normed: Tensor  # [rows, length, hidden], after the final norm
    logits: Tensor  # [rows, length, vocab]
    embedding: Tensor  # [vocab, hidden], which is the head, too
    last_keys: Tensor  # [rows, kv_heads, length, head_dim], rotated, of the last layer
    last_values: Tensor  # [rows, kv_heads, length, head_dim]

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embedding)

    def streams(self, layer_ids: tuple[int, ...]) -> Tensor:
        """Returns [rows, length, layers * hidden], the residual streams side by side."""
        return torch.cat([self.residuals[layer_id] for layer_id in layer_ids], dim=-1)


@torch.no_grad()
def target_states(network: Llama, ids: Tensor) -> TargetStates:
    model = network.model
    hidden = model.embed_tokens(ids)
    cos, sin = model.cos[: ids.shape[1]], model.sin[: ids.shape[1]]
    residuals: list[Tensor] = []
    keys = values = hidden
    for layer in model.layers:
        assert isinstance(layer, Layer)
        normed = layer.input_layernorm(hidden)
        queries, keys, values = layer.self_attn.project(normed, cos, sin)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        hidden = hidden + layer.self_attn.join(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        residuals.append(hidden)
    normed = model.norm(hidden)
    embedding = model.embed_tokens.weight
    return TargetStates(
        ids=ids,
        residuals=tuple(residuals),
        normed=normed,
        logits=functional.linear(normed, embedding),
        embedding=embedding.detach(),
        last_keys=keys,
        last_values=values,
    )
