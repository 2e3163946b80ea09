"""EAGLE-1: one Llama layer predicts the target's next hidden state (Li et al., 2024).

    x_i = W [emb(t_{i+1}) ; f_i] + b
    f'_{i+1} = Layer(x)_i            without the input norm of the layer and without a final norm
    p(t_{i+2}) = head(f'_{i+1})      with the target's head

f_i is the target's hidden state after its final norm; the next step takes f' in its place. Row i
has rope position i.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_drafters.configs import draft_shape, llama_config
from tools.train_drafters.drafter import (
    STEP_DECAY,
    Drafter,
    appended,
    chain_loss,
    num_params,
    shifted_ids,
)
from tools.train_drafters.layers import Block, reset_parameters
from tools.train_drafters.target import TargetStates
from tools.train_drafters.ttt import Unrolled
from tools.train_tiny.network import Llama, rotations

TRAINED_STEPS = 4


class Eagle(Drafter):
    num_drafts = TRAINED_STEPS

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.shape = draft_shape(target.shape, num_layers=1, intermediate_size=256)
        size = self.shape.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=True)
        self.layers = nn.ModuleList([Block(self.shape, has_input_norm=False)])
        self.cos, self.sin = rotations(self.shape)
        reset_parameters(self)

    @property
    def layer(self) -> Block:
        layer = self.layers[0]
        assert isinstance(layer, Block)
        return layer

    def loss(self, seen: TargetStates, weights: Tensor) -> Tensor:
        features = list(self.unrolled_features(seen))
        distances = torch.zeros(())
        for step, hidden in enumerate(features):
            true, counted = seen.normed[:, 1 + step :], weights[:, 1 + step :]
            distance = functional.smooth_l1_loss(hidden, true, reduction="none").mean(dim=-1)
            mean = (distance * counted).sum() / counted.sum().clamp(min=1.0)
            distances = distances + STEP_DECAY**step * mean
        return distances + chain_loss(map(seen.head, features), seen.logits, weights)

    def unrolled_features(self, seen: TargetStates) -> Iterator[Tensor]:
        unrolled = Unrolled(self.layer.self_attn, cos=self.cos, sin=self.sin)
        hidden = seen.normed
        for step in range(TRAINED_STEPS):
            ids = seen.ids[:, 1 + step :]
            fused = self.fused(seen.embed(ids), hidden[:, : ids.shape[1]])
            hidden = self.layer.after_attention(fused, unrolled.attend(fused))
            yield hidden

    def fused(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        fused: Tensor = self.fc(torch.cat((embedded, hidden), dim=-1))
        return fused

    def draft(self, seen: TargetStates, bonus: int, count: int) -> list[int]:
        ids, hidden = shifted_ids(seen, bonus), seen.normed
        drafts: list[int] = []
        for _ in range(count):
            length = ids.shape[1]
            fused = self.fused(seen.embed(ids), hidden)
            rows = self.layer.decoded(fused, self.cos[:length], self.sin[:length])
            drafts.append(int(seen.head(rows[0, -1]).argmax()))
            ids = appended(ids, drafts[-1])
            hidden = torch.cat((hidden, rows[:, -1:]), dim=1)
        return drafts

    def num_read(self, head: int) -> int:
        return num_params(self) + head

    def config(self) -> dict[str, object]:
        return {**llama_config(self.shape, "LlamaForCausalLMEagle"), "bias": True}
