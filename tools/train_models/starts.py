"""How the weights of a member begin: with those of the bundled model, where they fit."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from aserve.tiny import MODEL_DIR
from tools.train_tiny.export import load_network
from tools.train_tiny.network import Layer, Llama
from tools.train_tiny.packing import Packer
from tools.train_tiny.recipe import LONG, Stage
from tools.train_tiny.tokenizer import load_tokenizer

NOISE = 0.02
SAMPLE = Stage("sample", length=512, rows=4, steps=1, shares=LONG)


def bundled_layers() -> Iterator[tuple[Layer, Tensor]]:
    """Yields each layer of the bundled model, and what enters its attention for a sample of the
    corpus, after the norm: float32 [tokens, hidden].
    """
    network = load_network(MODEL_DIR)
    ids = Packer(load_tokenizer(MODEL_DIR), SAMPLE, seed=0).batch(0).ids[:, :-1]
    hidden = network.model.embed_tokens(ids)
    cos, sin = network.model.cos[: ids.shape[1]], network.model.sin[: ids.shape[1]]
    for layer in network.model.layers:
        assert isinstance(layer, Layer)
        yield layer, layer.input_layernorm(hidden).flatten(0, 1)
        hidden = layer(hidden, cos, sin)


def copy_ends(model: Any, bundled: Llama) -> None:
    """Copies embedding and final norm, and the head, which is the embedding."""
    model.model.embed_tokens.weight.copy_(bundled.model.embed_tokens.weight)
    model.model.norm.weight.copy_(bundled.model.norm.weight)
    model.lm_head.weight.copy_(bundled.model.embed_tokens.weight)


def copy_norms(layer: Any, source: Layer) -> None:
    layer.input_layernorm.weight.copy_(source.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)


def fill_experts(experts: Any, source: Layer, *, first: int, scale: float) -> None:
    """Gives each expert some units of the dense MLP, in turn, from unit `first` on.

    experts.gate_up_proj: [experts, 2 * intermediate, hidden]; down_proj: [experts, hidden,
    intermediate]. `scale` makes up for the units that no chosen expert has.
    """
    gates, ups = source.mlp.gate_proj.weight[first:], source.mlp.up_proj.weight[first:]
    downs = source.mlp.down_proj.weight[:, first:]
    num_experts, _, size = experts.down_proj.shape
    for expert in range(num_experts):
        start = expert * size % (len(gates) // size * size)
        rows = slice(start, start + size)
        experts.gate_up_proj[expert] = torch.cat((gates[rows], ups[rows]))
        experts.down_proj[expert] = scale * downs[:, rows]
    experts.gate_up_proj.add_(NOISE * torch.randn_like(experts.gate_up_proj))


def fill_mlp(mlp: Any, source: Layer, *, units: slice) -> None:
    mlp.gate_proj.weight.copy_(source.mlp.gate_proj.weight[units])
    mlp.up_proj.weight.copy_(source.mlp.up_proj.weight[units])
    mlp.down_proj.weight.copy_(source.mlp.down_proj.weight[:, units])


def low_rank(weight: Tensor, inputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns A [rank, in] and B [out, rank], so that B A x is near W x for such inputs x.

    With C = mean(x x^T) and the singular values W C^(1/2) = U S V^T, they are A = V^T C^(-1/2) and
    B = U S of the `rank` largest. The entries of A x have a mean square of 1, so that a norm of
    them changes little. weight: [out, in]; inputs: [tokens, in].
    """
    values, vectors = torch.linalg.eigh(inputs.T @ inputs / len(inputs))
    root = values.clamp(min=1e-8).sqrt()
    left, scales, right = torch.linalg.svd(weight @ vectors * root, full_matrices=False)
    down = right[:rank] / root @ vectors.T
    return down, left[:, :rank] * scales[:rank]
