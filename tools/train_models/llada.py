"""A dense LLaDA2: a block diffusion model, in plain torch with the published tensor names.

The sequence is cut into blocks of `block_size` from position 0 on, the prompt included. A position
sees all earlier blocks and the whole of its own, so a block is predicted in any order. Row i of the
logits predicts the id at position i itself.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_tiny.network import FeedForward, Shape, rotate, rotations

BLOCK_SIZE = 8
# Keys and values [rows, kv_heads, length, head_dim] of each layer.
Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Forward:
    """What each layer of a forward pass takes beside the hidden states."""

    cos: Tensor  # [length, rope_dim]
    sin: Tensor
    visible: Tensor | None  # bool [length, keys]; None if all keys are


class Llada(nn.Module):
    def __init__(self, shape: Shape, *, partial_rotary_factor: float) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        rope_dim = int(shape.head_dim * partial_rotary_factor)
        self.cos, self.sin = rotations(replace(shape, head_dim=rope_dim))

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Returns logits [rows, length, vocab], and the cache with the keys and values of ids.

        With a cache, `ids` are the next block. Without one they are whole rows, which may end
        within a block.
        """
        start = cache[0][0].shape[2] if cache else 0
        length = ids.shape[1]
        visible = None if cache else block_causal(length)
        rows = slice(start, start + length)
        inputs = Forward(self.cos[rows], self.sin[rows], visible)
        hidden = self.model.word_embeddings(ids)
        grown: Cache = []
        for index, layer in enumerate(self.model.layers):
            hidden, kept = layer(hidden, inputs, cache[index] if cache else None)
            grown.append(kept)
        return self.lm_head(self.model.norm(hidden)), grown

    def denoised(self, noisy: Tensor, clean: Tensor) -> Tensor:
        """Returns logits [rows, length, vocab] of noisy ids, each block after clean ones.

        Both are whole rows [rows, length]. The noisy ids of a block see that block of `noisy` and
        the blocks before it of `clean`; clean ids see what they see without noise.
        """
        length = noisy.shape[1]
        block = torch.arange(length) // BLOCK_SIZE
        earlier, same = block[:, None] > block, block[:, None] == block
        none = torch.zeros(length, length, dtype=torch.bool)
        visible = torch.cat(
            (torch.cat((same, earlier), dim=1), torch.cat((none, earlier | same), dim=1))
        )
        places = torch.arange(length).repeat(2)
        inputs = Forward(self.cos[places], self.sin[places], visible)
        hidden = self.model.word_embeddings(torch.cat((noisy, clean), dim=1))
        for layer in self.model.layers:
            hidden, _ = layer(hidden, inputs, None)
        logits: Tensor = self.lm_head(self.model.norm(hidden[:, :length]))
        return logits


def block_causal(length: int) -> Tensor:
    block = torch.arange(length) // BLOCK_SIZE
    return block[:, None] >= block


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.attention = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self, hidden: Tensor, inputs: Forward, cache: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, kept = self.attention(self.input_layernorm(hidden), inputs, cache)
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), kept


class Attention(nn.Module):
    """query_key_value has the rows of all query heads, then of key heads, then of value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.num_kv_heads = shape.num_key_value_heads
        heads = shape.num_attention_heads
        rows = (heads + 2 * self.num_kv_heads) * shape.head_dim
        self.query_key_value = nn.Linear(shape.hidden_size, rows, bias=False)
        self.dense = nn.Linear(heads * shape.head_dim, shape.hidden_size, bias=False)
        self.query_layernorm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.key_layernorm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(
        self, hidden: Tensor, inputs: Forward, cache: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        heads = self.query_key_value(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        kv = self.num_kv_heads
        queries, keys, values = heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]
        queries = partly_rotated(self.query_layernorm(queries), inputs)
        keys = partly_rotated(self.key_layernorm(keys), inputs)
        if cache is not None:
            keys = torch.cat((cache[0], keys), dim=2)
            values = torch.cat((cache[1], values), dim=2)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=inputs.visible, enable_gqa=True
        )
        return self.dense(mixed.transpose(1, 2).flatten(2)), (keys, values)


def partly_rotated(vectors: Tensor, inputs: Forward) -> Tensor:
    """Rotates the first dimensions of each head; the rest have no position."""
    size = inputs.cos.shape[-1]
    turned = rotate(vectors[..., :size], inputs.cos, inputs.sin)
    return torch.cat((turned, vectors[..., size:]), dim=-1)
