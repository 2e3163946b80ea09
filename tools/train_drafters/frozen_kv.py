"""Frozen-KV drafter: an assistant of Gemma 4 whose layers have queries only.

    z = W_pre [emb(t) * sqrt(B) ; h]
    each layer: x += norm(Attention(norm(x); keys and values of the target's last layer))
                x += norm(mlp(norm(x)))
    h' = W_post norm(x),  p = head(norm(x))       with the head tied to an embedding of its own

B is the target's hidden size. The first step takes the bonus id and the target's hidden state
after its final norm, of the last position L - 1; the next step takes the drafted id and h'. All
steps have rope position L - 1 and see the target's keys of positions 0 to L - 1.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_drafters.configs import SPECIAL_IDS
from tools.train_drafters.drafter import Drafter, chain_loss, num_params
from tools.train_drafters.layers import causal, compressed, reset_parameters
from tools.train_drafters.target import TargetStates
from tools.train_tiny.network import FeedForward, Llama, Shape, rotate, rotations

TRAINED_STEPS = 4


class FrozenKv(Drafter):
    num_drafts = TRAINED_STEPS

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.backbone_size = target.shape.hidden_size
        self.shape = replace(
            target.shape, hidden_size=64, intermediate_size=192, num_hidden_layers=2
        )
        size = self.shape.hidden_size
        self.pre_projection = nn.Linear(2 * self.backbone_size, size, bias=False)
        self.post_projection = nn.Linear(size, self.backbone_size, bias=False)
        self.model = AssistantDecoder(self.shape)
        self.cos, self.sin = rotations(self.shape)
        reset_parameters(self)
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(compressed(target.model.embed_tokens.weight, size))
            for name, weight in self.named_parameters():
                if name.endswith("q_norm.weight"):
                    weight.fill_(1 / self.shape.head_dim)  # the keys are not normed

    def step(self, embedded: Tensor, hidden: Tensor, heads: "FrozenHeads") -> tuple[Tensor, Tensor]:
        """Returns logits [rows, length, vocab] and the hidden states for the next step."""
        scaled = embedded * self.backbone_size**0.5
        inputs = self.pre_projection(torch.cat((scaled, hidden), dim=-1))
        normed = self.model(inputs, heads)
        logits = functional.linear(normed, self.model.embed_tokens.weight)
        return logits, self.post_projection(normed)

    def loss(self, seen: TargetStates, weights: Tensor) -> Tensor:
        return chain_loss(self.unrolled_logits(seen), seen.logits, weights)

    def unrolled_logits(self, seen: TargetStates) -> Iterator[Tensor]:
        hidden = seen.normed
        for step in range(TRAINED_STEPS):
            ids = seen.ids[:, 1 + step :]
            length = ids.shape[1]
            heads = FrozenHeads(
                keys=seen.last_keys[:, :, :length],
                values=seen.last_values[:, :, :length],
                cos=self.cos[:length],
                sin=self.sin[:length],
            )
            logits, hidden = self.step(seen.embed(ids), hidden[:, :length], heads)
            yield logits

    def draft(self, seen: TargetStates, bonus: int, count: int) -> list[int]:
        length = seen.ids.shape[1]
        heads = FrozenHeads(
            keys=seen.last_keys,
            values=seen.last_values,
            cos=self.cos[length - 1 : length],
            sin=self.sin[length - 1 : length],
        )
        hidden, token_id = seen.normed[:, -1:], bonus
        drafts: list[int] = []
        for _ in range(count):
            logits, hidden = self.step(seen.embed(torch.tensor([[token_id]])), hidden, heads)
            token_id = int(logits[0, -1].argmax())
            drafts.append(token_id)
        return drafts

    def num_read(self, head: int) -> int:
        return num_params(self)

    def config(self) -> dict[str, object]:
        shape = self.shape
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": self.backbone_size,
            "use_ordered_embeddings": False,
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text",
                "vocab_size": shape.vocab_size,
                "hidden_size": shape.hidden_size,
                "intermediate_size": shape.intermediate_size,
                "num_hidden_layers": shape.num_hidden_layers,
                "num_kv_shared_layers": shape.num_hidden_layers,
                "num_attention_heads": shape.num_attention_heads,
                "num_key_value_heads": shape.num_key_value_heads,
                "head_dim": shape.head_dim,
                "global_head_dim": shape.head_dim,
                "layer_types": ["full_attention"] * shape.num_hidden_layers,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
                "attention_bias": False,
                "attention_k_eq_v": False,
                "enable_moe_block": False,
                "use_double_wide_mlp": False,
                "final_logit_softcapping": None,
                "max_position_embeddings": shape.max_position_embeddings,
                "rms_norm_eps": shape.rms_norm_eps,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": shape.rope_theta},
                    "sliding_attention": {"rope_type": "default", "rope_theta": shape.rope_theta},
                },
                "tie_word_embeddings": True,
                **SPECIAL_IDS,
            },
            "torch_dtype": "bfloat16",
        }


class FrozenHeads:
    """The target's keys and values, and the rotation of the queries."""

    def __init__(self, *, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.keys, self.values, self.cos, self.sin = keys, values, cos, sin

    def attend(self, queries: Tensor) -> Tensor:
        """queries: [rows, heads, length, head_dim], one for each key, or one for all of them."""
        rotated = rotate(queries, self.cos, self.sin)
        # Gemma 4 scales no scores: the weight of its query norm does.
        if queries.shape[2] > 1:
            return causal(rotated, self.keys, self.values, scale=1.0)
        return functional.scaled_dot_product_attention(
            rotated, self.keys, self.values, scale=1.0, enable_gqa=True
        )


class AssistantDecoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(AssistantLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, hidden: Tensor, heads: FrozenHeads) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, heads)
        normed: Tensor = self.norm(hidden)
        return normed


class AssistantLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = FrozenAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = GeluFeedForward(shape)
        self.post_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.layer_scalar: Tensor
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden: Tensor, heads: FrozenHeads) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(hidden), heads)
        hidden = hidden + self.post_attention_layernorm(mixed)
        changed = self.mlp(self.pre_feedforward_layernorm(hidden))
        hidden = hidden + self.post_feedforward_layernorm(changed)
        return hidden * self.layer_scalar


class FrozenAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        query_size = shape.num_attention_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, heads: FrozenHeads) -> Tensor:
        queries = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        mixed: Tensor = self.o_proj(heads.attend(self.q_norm(queries)).transpose(1, 2).flatten(2))
        return mixed


class GeluFeedForward(FeedForward):
    def forward(self, hidden: Tensor) -> Tensor:
        gated = functional.gelu(self.gate_proj(hidden), approximate="tanh") * self.up_proj(hidden)
        projected: Tensor = self.down_proj(gated)
        return projected
