"""Greedy generation for a batch of prompts with a KV cache, in plain torch. It is the reference."""

import torch
from torch import Tensor

from tools.train_tiny.network import Caches, Llama
from tools.train_tiny.tokenizer import EOS, EOT, PAD

ROWS_AT_ONCE = 25
STOPS = (EOS, EOT)


def generate(network: Llama, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Returns the new ids of each prompt, up to and including a stop id."""
    answers: list[list[int]] = []
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        rows = prompts[first : first + ROWS_AT_ONCE]
        new_ids = generate_together(network, rows, max_tokens).tolist()
        answers += [until_stop(ids) for ids in new_ids]
    return answers


@torch.inference_mode()
def generate_together(network: Llama, prompts: list[list[int]], max_tokens: int) -> Tensor:
    """Pads the prompts on the left, so that all rows continue in the same column."""
    width = max(len(prompt) for prompt in prompts)
    pads = torch.tensor([width - len(prompt) for prompt in prompts])
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    caches = empty_caches(network, rows=len(prompts))
    columns = torch.arange(width)
    is_real = columns[None, :] >= pads[:, None]  # [rows, width]
    causal = columns[:, None] >= columns[None, :]  # [width, width]
    # NOTE: a padding query sees itself, because an empty row of the mask would give NaN.
    visible = (is_real[:, None, :] & causal) | torch.eye(width, dtype=torch.bool)
    positions = (columns[None, :] - pads[:, None]).clamp(min=0)
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    new_ids: list[Tensor] = []
    for length in range(width + 1, width + 1 + max_tokens):
        logits, caches = network.extend(ids, caches=caches, positions=positions, visible=visible)
        ids = logits.argmax(dim=-1, keepdim=True)
        new_ids.append(ids)
        is_done |= torch.isin(ids[:, 0], torch.tensor(STOPS))
        if bool(is_done.all()):
            break
        visible = (torch.arange(length)[None, :] >= pads[:, None])[:, None]
        positions = length - 1 - pads[:, None]
    return torch.cat(new_ids, dim=1)


def empty_caches(network: Llama, *, rows: int) -> Caches:
    shape = network.shape
    empty = torch.zeros(rows, shape.num_key_value_heads, 0, shape.head_dim)
    return [(empty, empty)] * shape.num_hidden_layers


def until_stop(ids: list[int]) -> list[int]:
    for index, token_id in enumerate(ids):
        if token_id in STOPS:
            return ids[: index + 1]
    return ids
