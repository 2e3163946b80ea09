"""Batched continuation of prompts by the target, greedy or sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tools.train_tiny.network import Layer, Llama
from tools.train_tiny.tokenizer import EOS, EOT, PAD

STOPS = torch.tensor((EOS, EOT))


@dataclass(frozen=True)
class Sampling:
    """How the rows of a batch are continued. Temperature 0 is greedy."""

    temperatures: Tensor  # float32 [rows]
    goes_on: Tensor  # bool [rows], true where a stop id does not end the row
    max_tokens: int
    generator: torch.Generator


class KvBuffers:
    """The keys and values of a batch, one pair [rows, kv_heads, width, head_dim] for each layer."""

    def __init__(self, network: Llama, *, rows: int, width: int) -> None:
        shape = network.shape
        size = (rows, shape.num_key_value_heads, width, shape.head_dim)
        count = shape.num_hidden_layers
        self.pairs = [(torch.zeros(size), torch.zeros(size)) for _ in range(count)]

    def select(self, rows: Tensor) -> None:
        self.pairs = [(keys[rows], values[rows]) for keys, values in self.pairs]


@torch.inference_mode()
def continued(network: Llama, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    """Returns each prompt with its new ids, up to and including a stop id.

    The prompts are padded on the left, so that all rows continue in the same column. Rows that
    ended are taken out of the batch once they are half of it.
    """
    texts = [list(prompt) for prompt in prompts]
    width = max(map(len, prompts))
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    buffers = KvBuffers(network, rows=len(prompts), width=width + sampling.max_tokens)
    live = torch.arange(len(prompts))  # the text of each row of the batch
    has_ended = torch.zeros(len(prompts), dtype=torch.bool)
    for column in range(width, width + sampling.max_tokens):
        logits = extended(network, ids, buffers, pads=pads, end=column)
        ids = chosen(logits, sampling.temperatures[live], sampling.generator)
        for row in (~has_ended).nonzero()[:, 0].tolist():
            texts[int(live[row])].append(int(ids[row, 0]))
        has_ended |= torch.isin(ids[:, 0], STOPS) & ~sampling.goes_on[live]
        if bool(has_ended.all()):
            break
        if int(has_ended.sum()) * 2 > len(live):
            kept = (~has_ended).nonzero()[:, 0]
            live, ids, pads, has_ended = live[kept], ids[kept], pads[kept], has_ended[kept]
            buffers.select(kept)
    return texts


def extended(network: Llama, ids: Tensor, buffers: KvBuffers, *, pads: Tensor, end: int) -> Tensor:
    """Runs the ids of the columns before `end`, and returns the logits [rows, vocab] of the last.

    ids: int64 [rows, new]; pads: int64 [rows], the number of padding columns of each row.
    """
    start = end - ids.shape[1]
    columns = torch.arange(end)
    is_causal = columns[start:, None] >= columns[None, :]  # [new, end]
    is_self = columns[start:, None] == columns[None, :]
    # NOTE: a padding query sees itself, because an empty row of the mask would give NaN.
    visible = (is_causal & (columns[None, None, :] >= pads[:, None, None])) | is_self
    positions = (columns[None, start:] - pads[:, None]).clamp(min=0)
    model = network.model
    cos, sin = model.cos[positions][:, None], model.sin[positions][:, None]
    hidden = model.embed_tokens(ids)
    for layer, (keys, values) in zip(model.layers, buffers.pairs, strict=True):
        assert isinstance(layer, Layer)
        queries, new_keys, new_values = layer.self_attn.project(
            layer.input_layernorm(hidden), cos, sin
        )
        keys[:, :, start:end] = new_keys
        values[:, :, start:end] = new_values
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=visible[:, None],
            enable_gqa=True,
        )
        hidden = hidden + layer.self_attn.join(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return functional.linear(model.norm(hidden[:, -1]), model.embed_tokens.weight)


def chosen(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Returns int64 [rows, 1], drawn by the Gumbel-max trick."""
    uniform = torch.rand(logits.shape, generator=generator).clamp(min=1e-20, max=1 - 2**-24)
    noise = -torch.log(-torch.log(uniform))
    # The argmax of logits / t + noise is the argmax of logits + t * noise, also for t = 0.
    return (logits + temperatures[:, None] * noise).argmax(dim=-1, keepdim=True)
