"""The network for training: a plain Llama in torch with the parameter names of Hugging Face."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# Of each layer: keys and values, [rows, kv_heads, length, head_dim].
Caches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """The sizes of the network, with the names of config.json."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the output projections to zero, so that each layer starts as the identity."""
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(weight, std=0.02)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits [rows, length, vocab] of ids int64 [rows, length]."""
        hidden = self.model(ids)
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def extend(
        self, ids: Tensor, *, caches: Caches, positions: Tensor, visible: Tensor
    ) -> tuple[Tensor, Caches]:
        """Returns logits [rows, vocab] of the last id of each row, and the caches with `ids`.

        ids, positions: int64 [rows, new]; visible: bool [rows, new, old + new].
        """
        hidden, grown = self.model.extend(ids, caches, positions=positions, visible=visible)
        return functional.linear(hidden[:, -1], self.model.embed_tokens.weight), grown


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.cos, self.sin = rotations(shape)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoded(self.embed_tokens(ids))

    def decoded(self, hidden: Tensor) -> Tensor:
        """Returns the normed output of the last layer for embeddings [rows, length, hidden]."""
        length = hidden.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        normed: Tensor = self.norm(hidden)
        return normed

    def extend(
        self, ids: Tensor, caches: Caches, *, positions: Tensor, visible: Tensor
    ) -> tuple[Tensor, Caches]:
        hidden = self.embed_tokens(ids)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        grown: Caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            hidden, cache_after = layer.extend(hidden, cache, rotation=(cos, sin), visible=visible)
            grown.append(cache_after)
        return self.norm(hidden), grown


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        changed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return changed

    def extend(
        self,
        hidden: Tensor,
        cache: tuple[Tensor, Tensor],
        *,
        rotation: tuple[Tensor, Tensor],
        visible: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, grown = self.self_attn.extend(
            self.input_layernorm(hidden), cache, rotation=rotation, visible=visible
        )
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), grown


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        queries, keys, values = self.project(hidden, cos, sin)
        group = queries.shape[1] // keys.shape[1]
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(group, 1),
            values.repeat_interleave(group, 1),
            is_causal=True,
        )
        return self.join(mixed)

    def extend(
        self,
        hidden: Tensor,
        cache: tuple[Tensor, Tensor],
        *,
        rotation: tuple[Tensor, Tensor],
        visible: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        queries, keys, values = self.project(hidden, *rotation)
        keys = torch.cat((cache[0], keys), dim=2)
        values = torch.cat((cache[1], values), dim=2)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible[:, None], enable_gqa=True
        )
        return self.join(mixed), (keys, values)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries and keys, and values, each [rows, heads, length, head_dim]."""
        split = (*hidden.shape[:2], -1, self.head_dim)
        queries = self.q_proj(hidden).view(split).transpose(1, 2)
        keys = self.k_proj(hidden).view(split).transpose(1, 2)
        values = self.v_proj(hidden).view(split).transpose(1, 2)
        return rotate(queries, cos, sin), rotate(keys, cos, sin), values

    def join(self, mixed: Tensor) -> Tensor:
        """Projects the outputs [rows, heads, length, head_dim] of all heads."""
        joined: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return joined


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gated = functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        projected: Tensor = self.down_proj(gated)
        return projected


def rotations(shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [positions, head_dim] for rope with rotated halves."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**steps
    positions = torch.arange(shape.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cos + torch.cat((-second, first), dim=-1) * sin
