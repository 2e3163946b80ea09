"""The layers that the drafters are built of, with the parameter names of Hugging Face."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_tiny.network import FeedForward, Shape, rotate


@dataclass(frozen=True)
class AttentionForm:
    """How an attention layer differs from Llama's."""

    input_size: int | None = None  # where it is not the hidden size
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


LLAMA = AttentionForm()
QWEN2 = AttentionForm(has_qkv_bias=True)
QWEN3 = AttentionForm(has_qk_norm=True)


class Attention(nn.Module):
    def __init__(self, shape: Shape, form: AttentionForm) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        input_size = form.input_size or shape.hidden_size
        self.q_proj = nn.Linear(input_size, query_size, bias=form.has_qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=form.has_qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=form.has_qkv_bias)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        norm = nn.RMSNorm if form.has_qk_norm else nn.Identity
        self.q_norm = norm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = norm(shape.head_dim, eps=shape.rms_norm_eps)

    def queries(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns rotated queries [rows, heads, length, head_dim] of [rows, length, size]."""
        return rotate(self.q_norm(self.split(self.q_proj(hidden))), cos, sin)

    def keys_values(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rotated keys and values, both [rows, kv_heads, length, head_dim]."""
        keys = rotate(self.k_norm(self.split(self.k_proj(hidden))), cos, sin)
        return keys, self.split(self.v_proj(hidden))

    def split(self, projected: Tensor) -> Tensor:
        heads: Tensor = projected.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def join(self, mixed: Tensor) -> Tensor:
        """Projects the outputs [rows, heads, length, head_dim] of all heads."""
        joined: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    """A decoder layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""

    def __init__(
        self, shape: Shape, form: AttentionForm = LLAMA, *, has_input_norm: bool = True
    ) -> None:
        super().__init__()
        input_norm = nn.RMSNorm if has_input_norm else nn.Identity
        self.input_layernorm = input_norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape, form)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def decoded(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden)
        queries = self.self_attn.queries(normed, cos, sin)
        mixed = causal(queries, *self.self_attn.keys_values(normed, cos, sin))
        return self.after_attention(hidden, mixed)

    def after_attention(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + self.self_attn.join(mixed)
        changed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return changed


def reset_parameters(module: nn.Module) -> None:
    """Sets the output projections to zero, so that each layer starts as the identity."""
    for name, weight in module.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
            nn.init.zeros_(weight)
        elif weight.ndim == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def compressed(embedding: Tensor, size: int) -> Tensor:
    """The principal components [vocab, size] of an embedding [vocab, hidden], to start from."""
    left, scales, _ = torch.linalg.svd(embedding.detach(), full_matrices=False)
    components: Tensor = left[:, :size] * scales[:size]
    return components


def causal(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True, scale=scale
    )


def per_query_head(vectors: Tensor, num_heads: int) -> Tensor:
    """Repeats keys or values [rows, kv_heads, ...] for the query heads that share them."""
    return vectors.repeat_interleave(num_heads // vectors.shape[1], 1)
