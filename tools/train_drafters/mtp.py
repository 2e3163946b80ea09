"""Multi-token prediction: D modules of one layer, in the names of MiMo's checkpoints.

    x^k_i = W_k [norm_h(h^{k-1}_i) ; norm_e(emb(t_{i+k}))]
    h^k_i = Layer_k(x^k)_i
    p(t_{i+k+1}) = head(norm_k(h^k_i))      with the target's head

h^0 is the target's residual stream before its final norm, and each module takes the stream of the
one before it, also before its norm. Row i has rope position i in every module. MiMo puts the
hidden state first in W_k, DeepSeek the embedding.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tools.train_drafters.configs import draft_shape, llama_config
from tools.train_drafters.drafter import Drafter, appended, chain_loss, num_params, shifted_ids
from tools.train_drafters.layers import QWEN2, Block, reset_parameters
from tools.train_drafters.target import TargetStates
from tools.train_tiny.network import Llama, Shape, rotations

NUM_MODULES = 3


class MultiTokenPrediction(Drafter):
    num_drafts = NUM_MODULES

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.shape = draft_shape(
            target.shape, num_layers=target.shape.num_hidden_layers, intermediate_size=256
        )
        modules = (Module(self.shape) for _ in range(NUM_MODULES))
        self.model = nn.ModuleDict({"mtp_layers": nn.ModuleList(modules)})
        self.cos, self.sin = rotations(self.shape)
        reset_parameters(self)
        with torch.no_grad():
            for module in self.predictors:
                module.final_layernorm.weight.copy_(target.model.norm.weight)

    @property
    def predictors(self) -> list["Module"]:
        layers = self.model["mtp_layers"]
        assert isinstance(layers, nn.ModuleList)
        return [layer for layer in layers if isinstance(layer, Module)]

    def loss(self, seen: TargetStates, weights: Tensor) -> Tensor:
        return chain_loss(self.module_logits(seen), seen.logits, weights)

    def module_logits(self, seen: TargetStates) -> Iterator[Tensor]:
        hidden = seen.residuals[-1]
        for depth, module in enumerate(self.predictors, start=1):
            ids = seen.ids[:, depth:]
            hidden = self.run(module, seen.embed(ids), hidden[:, : ids.shape[1]])
            yield seen.head(module.final_layernorm(hidden))

    def run(self, module: "Module", embedded: Tensor, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        rows: Tensor = module(embedded, hidden, self.cos[:length], self.sin[:length])
        return rows

    def draft(self, seen: TargetStates, bonus: int, count: int) -> list[int]:
        ids, hidden = shifted_ids(seen, bonus), seen.residuals[-1]
        drafts: list[int] = []
        for module in self.predictors[:count]:
            hidden = self.run(module, seen.embed(ids), hidden)
            drafts.append(int(seen.head(module.final_layernorm(hidden[0, -1])).argmax()))
            # The next module reads ids one position further on, with the draft at the end.
            ids = appended(ids[:, 1:], drafts[-1])
        return drafts

    def num_read(self, head: int) -> int:
        return num_params(self) // NUM_MODULES + head

    def config(self) -> dict[str, object]:
        return {
            **llama_config(self.shape, "MiMoForCausalLM"),
            "model_type": "mimo",
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_nextn_predict_layers": NUM_MODULES,
        }


class Module(Block):
    """A decoder layer of Qwen2, which has biases, behind the projection of its two inputs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, QWEN2)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(size, eps=eps)
        self.hidden_layernorm = nn.RMSNorm(size, eps=eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = nn.RMSNorm(size, eps=eps)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = (self.hidden_layernorm(hidden), self.token_layernorm(embedded))
        return self.decoded(self.input_proj(torch.cat(normed, dim=-1)), cos, sin)
