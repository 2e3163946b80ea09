"""The load of experts: which part of the tokens of a text each expert of a layer gets."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.train_tiny.evaluate import held_out_rows
from tools.train_tiny.tokenizer import PAD

KINDS = ("story", "chat_sum", "chat_json", "recall", "function")
DOCUMENTS = 8


@contextmanager
def chosen_experts(network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields a dict that each forward pass fills: by router, its choices [tokens, top_k].

    A router is a module of transformers that returns logits, weights and choices.
    """
    chosen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(
            lambda _, __, output, name=name: chosen.__setitem__(name, output[2].detach())
        )
        for name, module in network.named_modules()
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter"))
    ]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def loads(chosen: Tensor, num_experts: int) -> Tensor:
    """Returns the part of all choices [tokens, top_k] that each expert has: float32 [experts]."""
    return torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()


@torch.inference_mode()
def least_load(network: nn.Module, tokenizer: Tokenizer, *, num_experts: int) -> float:
    """Returns the least load of an expert, over the layers and texts of several kinds."""
    rows = [row for kind in KINDS for row in held_out_rows(tokenizer, kind, DOCUMENTS)]
    ids = torch.tensor([token_id for row in rows for token_id in row if token_id != PAD])
    width = 512
    ids = ids[: len(ids) // width * width].view(-1, width)
    with chosen_experts(network) as chosen:
        network(ids, use_cache=False)
    return min(float(loads(choices, num_experts).min()) for choices in chosen.values())
