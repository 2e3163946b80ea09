"""A small Llama of the same vocabulary, which drafts from the ids alone."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from tools.train_drafters.configs import llama_config
from tools.train_drafters.drafter import Drafter, appended, num_params, soft_cross_entropy
from tools.train_drafters.layers import compressed, reset_parameters
from tools.train_drafters.target import TargetStates
from tools.train_tiny.network import Decoder, Llama


class SmallLm(Drafter):
    num_drafts = 7

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.shape = replace(
            target.shape,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        self.model = Decoder(self.shape)
        reset_parameters(self)
        with torch.no_grad():
            compact = compressed(target.model.embed_tokens.weight, self.shape.hidden_size)
            self.model.embed_tokens.weight.copy_(compact)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.model(ids), self.model.embed_tokens.weight)

    def loss(self, seen: TargetStates, weights: Tensor) -> Tensor:
        return soft_cross_entropy(self(seen.ids), seen.logits, weights)

    def draft(self, seen: TargetStates, bonus: int, count: int) -> list[int]:
        ids = appended(seen.ids, bonus)
        for _ in range(count):
            ids = appended(ids, int(self(ids)[0, -1].argmax()))
        drafts: list[int] = ids[0, -count:].tolist()
        return drafts

    def num_read(self, head: int) -> int:
        return num_params(self)

    def config(self) -> dict[str, object]:
        return {**llama_config(self.shape, "LlamaForCausalLM"), "tie_word_embeddings": True}
